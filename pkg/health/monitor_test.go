package health

import (
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	address = device.PCIAddress("0000:1b:00.0")
	uuid    = "GPU-1"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// gpu can be cut into 1g (1 slice), 3g (4 slices) and 7g (8 slices).
var gpu = device.GPU{PCIAddress: address, UUID: uuid, MIG: &device.MIG{Enabled: true, Profiles: []device.Profile{
	{ID: 19, Name: "1g.10gb", Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6}},
	{ID: 9, Name: "3g.40gb", Size: 4, Starts: []uint32{0, 4}},
	{ID: 0, Name: "7g.80gb", Size: 8, Starts: []uint32{0}},
}}}

const whole = "gpu-0000-1b-00-0"

// watched is a monitor with a clock, to which a test tells things.
type watched struct {
	*Monitor
	t   *testing.T
	now time.Time
}

func watch(t *testing.T, o Options) *watched {
	t.Helper()
	w := &watched{Monitor: New(o, start), t: t, now: start}
	w.listen("load-1")
	w.Expect([]device.GPU{gpu}, w.now)
	w.ok()
	return w
}

func (w *watched) listen(driver string) {
	w.Apply(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, Driver: driver, At: w.now}}, w.now)
}

// pass lets time pass, while the card answers that nothing is new.
func (w *watched) pass(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.wait(min(20*time.Second, end.Sub(w.now)))
		w.ok()
	}
}

func (w *watched) wait(d time.Duration) {
	w.now = w.now.Add(d)
	w.Tick(w.now)
}

func (w *watched) answer(c device.Condition) {
	c.Card, c.At = gpu.Card(), w.now
	if c.Reach == "" {
		c.Reach = device.ReachOK
	}
	w.Apply(device.Signal{Condition: &c}, w.now)
}

func (w *watched) counts(uncorrected, energy uint64) {
	w.wait(time.Second)
	w.answer(device.Condition{Uncorrected: &uncorrected, EnergyMillijoules: &energy})
}

func (w *watched) ok() { w.answer(device.Condition{}) }

func (w *watched) recovery(a device.RecoveryAction) { w.answer(device.Condition{Recovery: a}) }

func (w *watched) event(e device.HealthEvent) {
	w.now = w.now.Add(time.Millisecond)
	e.Card, e.At = gpu.Card(), w.now
	w.Apply(device.Signal{Event: &e}, w.now)
}

func (w *watched) xid(code uint64) { w.event(device.HealthEvent{Kind: device.EventXID, XID: code}) }

// xidOn is one of the instance at that place.
func (w *watched) xidOn(code uint64, profile, first, size uint32) {
	w.event(device.HealthEvent{
		Kind: device.EventXID, XID: code, GPUInstance: ptr.To(uint32(3)), ComputeInstance: ptr.To(uint32(0)),
		Place: &device.EventPlace{ProfileID: profile, Placement: device.Placement{Start: first, Size: size}},
	})
}

func (w *watched) of(name string) Verdict {
	w.t.Helper()
	n, ok := device.ParseName(name)
	if !ok {
		w.t.Fatal(name)
	}
	return w.View().Of(gpu, n)
}

func (w *watched) want(name string, s State) {
	w.t.Helper()
	if v := w.of(name); v.State != s {
		w.t.Errorf("%s is %s (%s), want %s", name, v.State, v.Message(), s)
	}
}

func TestAGPUThatFellOffTheBusIsTakenOutUntilTheDriverIsContent(t *testing.T) {
	w := watch(t, Options{})
	w.want(whole, Healthy)
	w.recovery(device.RecoveryNone)
	w.xid(79)
	w.want(whole, Unhealthy)
	v := w.of(whole)
	if c := v.Causes[0]; c.Code != "xid-79" || !strings.Contains(c.Message(), "PCIe bus") || !strings.Contains(c.Action, "power") || !c.Since.Equal(w.now) {
		t.Errorf("%+v", c)
	}
	w.recovery(device.RecoveryNone)
	w.want(whole, Unhealthy) // it was none all along
	w.recovery(device.RecoveryReset)
	w.pass(24 * time.Hour)
	w.want(whole, Unhealthy)
	w.recovery(device.RecoveryUnknown)
	w.want(whole, Unhealthy)
	w.recovery(device.RecoveryNone)
	w.want(whole, Healthy)
}

func TestWhatEndsAFindingThatAResetEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(w *watched)
		still State
	}{
		"time alone":                         {func(w *watched) { w.pass(48 * time.Hour) }, Unhealthy},
		"a driver that knows of no recovery": {func(w *watched) { w.recovery(device.RecoveryUnknown) }, Unhealthy},
		"a driver that always said none":     {func(w *watched) { w.recovery(device.RecoveryNone); w.recovery(device.RecoveryNone) }, Unhealthy},
		"the action goes to none": {func(w *watched) {
			w.recovery(device.RecoveryDrainAndReset)
			w.recovery(device.RecoveryUnknown)
			w.recovery(device.RecoveryNone)
		}, Healthy},
		"the action is announced to be none": {func(w *watched) {
			w.recovery(device.RecoveryReset)
			w.event(device.HealthEvent{Kind: device.EventRecoveryAction, Recovery: device.RecoveryNone})
		}, Healthy},
		"the action becomes another": {func(w *watched) { w.recovery(device.RecoveryReset); w.recovery(device.RecoveryReboot) }, Unhealthy},
		"more errors are counted": {func(w *watched) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(1))})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(2))})
			w.answer(device.Condition{})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(2))})
		}, Unhealthy},
		"errors are counted anew": {func(w *watched) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(1))})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(0))})
		}, Healthy},
		"energy is counted anew": {func(w *watched) {
			w.answer(device.Condition{EnergyMillijoules: ptr.To(uint64(1000))})
			w.answer(device.Condition{EnergyMillijoules: ptr.To(uint64(2))})
		}, Healthy},
		"it was lost and is back":    {func(w *watched) { w.answer(device.Condition{Reach: device.ReachLost}); w.ok() }, Healthy},
		"it failed and answers":      {func(w *watched) { w.answer(device.Condition{Reach: device.ReachFailed}); w.ok() }, Unhealthy},
		"it hung and answers":        {func(w *watched) { w.answer(device.Condition{Reach: device.ReachWedged}); w.ok() }, Unhealthy},
		"the driver is loaded again": {func(w *watched) { w.wait(time.Second); w.listen("load-2") }, Healthy},
		"who listens begins again":   {func(w *watched) { w.wait(time.Second); w.listen("load-1") }, Unhealthy},
		"the action goes by way of a milder one to none": {func(w *watched) {
			w.recovery(device.RecoveryReset)
			w.recovery(device.RecoveryDrainP2P)
			w.recovery(device.RecoveryNone)
		}, Healthy},
		"the IMEX domain is repaired":  {func(w *watched) { w.recovery(device.RecoveryIMEXDomain); w.recovery(device.RecoveryNone) }, Unhealthy},
		"peer-to-peer use has ended":   {func(w *watched) { w.recovery(device.RecoveryDrainP2P); w.recovery(device.RecoveryNone) }, Unhealthy},
		"an admin clears error counts": {func(w *watched) { w.counts(3, 1000); w.counts(0, 2000) }, Unhealthy},
		"all is counted anew":          {func(w *watched) { w.counts(3, 1000); w.counts(0, 10) }, Healthy},
		"it was out of sight": {func(w *watched) {
			w.counts(0, 1000)
			w.answer(device.Condition{Reach: device.ReachLost})
			w.counts(0, 2000)
		}, Unhealthy},
		"it was lost and begins anew": {func(w *watched) {
			w.counts(0, 1000)
			w.answer(device.Condition{Reach: device.ReachLost})
			w.counts(0, 10)
		}, Healthy},
		"it needed a reset and had one": {func(w *watched) { w.answer(device.Condition{Reach: device.ReachNeedsReset}); w.ok() }, Healthy},
		"another card is there": {func(w *watched) {
			w.Expect([]device.GPU{{PCIAddress: address, UUID: "GPU-2"}}, w.now)
		}, Healthy},
	} {
		t.Run(name, func(t *testing.T) {
			for _, code := range []uint64{48, 64, 79, 95, 119} {
				w := watch(t, Options{})
				w.xid(code)
				w.wait(time.Second)
				c.end(w)
				w.want(whole, c.still)
			}
		})
	}
}

func TestApplicationErrorsNeverTakeAGPUOut(t *testing.T) {
	for _, code := range []uint64{8, 13, 31, 43, 45, 68, 94, 63, 92} {
		w := watch(t, Options{})
		for range 100 {
			w.xid(code)
			w.want(whole, Healthy)
		}
		if f := w.View().Findings(address); len(f) != 1 || f[0].Count != 100 {
			t.Errorf("XID %d: %+v", code, f)
		}
		if changes := w.Changes(); len(changes) != 1 || changes[0].Finding.Count != 1 {
			t.Errorf("XID %d is told as %+v", code, changes)
		}
		w.pass(DefaultQuiet + time.Second)
		if f := w.View().Findings(address); len(f) != 0 {
			t.Errorf("XID %d is still told after a quiet time: %+v", code, f)
		}
	}
}

func TestWhatDegradesPassesWhereNoResetIsAskedFor(t *testing.T) {
	for code, after := range map[uint64]State{144: Healthy, 121: Healthy, 9999: Healthy, 58: Degraded, 173: Degraded} {
		w := watch(t, Options{})
		w.xid(code)
		w.want(whole, Degraded)
		w.pass(DefaultQuiet - time.Minute)
		w.xid(code) // begins again
		w.pass(DefaultQuiet - time.Minute)
		w.want(whole, Degraded)
		w.pass(2 * time.Minute)
		w.want(whole, after)
	}
}

func TestAnAdminSaysWhatAnXIDMeans(t *testing.T) {
	rules, err := ParseRules("79=app, 31=unhealthy,43=degraded,48=ignore,")
	if err != nil {
		t.Fatal(err)
	}
	for code, want := range map[uint64]State{79: Healthy, 31: Unhealthy, 43: Degraded, 48: Healthy, 95: Unhealthy} {
		w := watch(t, Options{Rules: rules})
		w.xid(code)
		w.want(whole, want)
		if n := w.Counts()[Counted{address, "xid-" + map[uint64]string{79: "79", 31: "31", 43: "43", 48: "48", 95: "95"}[code]}]; n != 1 {
			t.Errorf("XID %d was counted %d times", code, n)
		}
	}
	for _, wrong := range []string{"79", "=app", "x=app", "79=dead", "-1=app"} {
		if _, err := ParseRules(wrong); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
}

func TestAnErrorOfAnInstanceReachesWhatSharesItsMemory(t *testing.T) {
	w := watch(t, Options{})
	w.xidOn(95, 19, 1, 1)
	w.want(whole+"-mig-19-1", Unhealthy)
	w.want(whole+"-mig-9-0", Unhealthy) // would be cut from the same memory
	w.want(whole, Unhealthy)
	w.want(whole+"-mig-19-0", Healthy)
	w.want(whole+"-mig-9-4", Healthy)
	if c := w.Changes(); len(c) != 1 || c[0].Device() != whole+"-mig-19-1" {
		t.Errorf("%+v", c)
	}
	w.recovery(device.RecoveryReset)
	w.recovery(device.RecoveryNone)
	w.want(whole+"-mig-19-1", Healthy)
}

func TestAnErrorOfTheCardReachesAllInstances(t *testing.T) {
	w := watch(t, Options{})
	w.xid(95)
	for _, name := range gpu.DeviceNames() {
		w.want(name, Unhealthy)
	}
	w = watch(t, Options{})
	// Nobody knows where that instance was: it may be any.
	w.event(device.HealthEvent{Kind: device.EventXID, XID: 95, GPUInstance: ptr.To(uint32(3))})
	for _, name := range gpu.DeviceNames() {
		w.want(name, Unhealthy)
	}
}

func TestAnErrorOfAPartOfAnInstanceReachesThatPart(t *testing.T) {
	w := watch(t, Options{})
	w.event(device.HealthEvent{
		Kind: device.EventXID, XID: 95, GPUInstance: ptr.To(uint32(1)), ComputeInstance: ptr.To(uint32(2)),
		Place: &device.EventPlace{ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Part: true},
	})
	w.want(whole+"-mig-9-4-ci-2", Unhealthy)
	w.want(whole+"-mig-9-4-ci-1", Healthy)
	w.want(whole+"-mig-9-0", Healthy)
}

func TestAPendingRemapIsDegradedUntilTheReset(t *testing.T) {
	w := watch(t, Options{})
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	w.pass(100 * time.Hour) // answers that do not say
	w.want(whole, Degraded)
	w.xid(64)
	w.want(whole, Unhealthy)
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	w.answer(device.Condition{Remap: &device.Remap{}})
	w.want(whole, Healthy)
	w.answer(device.Condition{Remap: &device.Remap{Failed: true}})
	w.want(whole, Unhealthy)
	w.answer(device.Condition{Remap: &device.Remap{}})
	w.want(whole, Healthy)
}

func TestTheDriversRecommendationIsFollowed(t *testing.T) {
	for action, want := range map[device.RecoveryAction]State{
		device.RecoveryNone: Healthy, device.RecoveryUnknown: Healthy, device.RecoveryReset: Unhealthy, device.RecoveryReboot: Unhealthy,
		device.RecoveryDrainP2P: Unhealthy, device.RecoveryDrainAndReset: Unhealthy, device.RecoveryBusReset: Unhealthy,
		device.RecoverySystemReboot: Unhealthy, device.RecoveryIMEXDomain: Degraded, device.RecoveryOther: Unhealthy, "new": Unhealthy,
	} {
		w := watch(t, Options{})
		w.recovery(action)
		w.want(whole, want)
		w.recovery(device.RecoveryUnknown)
		w.want(whole, want)
		w.recovery(device.RecoveryNone)
		w.want(whole, Healthy)
	}
}

func TestADoubleBitErrorIsTheDriversToJudge(t *testing.T) {
	w := watch(t, Options{})
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.want(whole, Unhealthy) // the driver knows of no recovery
	w = watch(t, Options{})
	w.recovery(device.RecoveryNone)
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.want(whole, Degraded)
	w.recovery(device.RecoveryReset)
	w.want(whole, Unhealthy)
}

func TestNobodyKnowsHowASilentGPUIs(t *testing.T) {
	for name, c := range map[string]struct {
		say   func(w *watched)
		want  State
		later State // half a minute on, of the same
	}{
		"nothing is said":          {func(*watched) {}, Healthy, Unknown},
		"it hangs":                 {func(w *watched) { w.answer(device.Condition{Reach: device.ReachWedged}) }, Unknown, Unknown},
		"it answers with an error": {func(w *watched) { w.answer(device.Condition{Reach: device.ReachFailed, Error: "busy"}) }, Healthy, Unknown},
		"nobody listens": {func(w *watched) {
			w.Apply(device.Signal{Watcher: &device.WatcherState{Error: "it died", At: w.now}}, w.now)
		}, Healthy, Unknown},
		"the hardware was let go of": {func(w *watched) {
			w.Apply(device.Signal{Watcher: &device.WatcherState{Released: true, At: w.now}}, w.now)
		}, Unknown, Unknown},
		"it is lost": {func(w *watched) { w.answer(device.Condition{Reach: device.ReachLost}) }, Lost, Lost},
		"it is lost and then hangs": {func(w *watched) {
			w.answer(device.Condition{Reach: device.ReachLost})
			w.answer(device.Condition{Reach: device.ReachWedged})
		}, Lost, Lost},
	} {
		t.Run(name, func(t *testing.T) {
			w := watch(t, Options{})
			c.say(w)
			w.want(whole, c.want)
			for range 31 {
				w.wait(time.Second)
			}
			w.want(whole, c.later)
			w.listen("load-1")
			w.ok()
			w.want(whole, Healthy)
			w.pass(time.Hour)
			w.want(whole, Healthy)
		})
	}
}

func TestNobodyListensAfterTheStart(t *testing.T) {
	m := New(Options{}, start)
	m.Expect([]device.GPU{gpu}, start)
	m.Tick(start.Add(silenceFor - time.Second))
	if v := m.View().Of(gpu, device.Name{GPU: whole}); v.State != Healthy {
		t.Errorf("%+v", v)
	}
	m.Tick(start.Add(silenceFor))
	if v := m.View().Of(gpu, device.Name{GPU: whole}); v.State != Unknown || !strings.Contains(v.Message(), "nobody listens") {
		t.Errorf("%+v", v)
	}
}

func TestAFabricMayTakeItsTime(t *testing.T) {
	w := watch(t, Options{})
	joining := device.Condition{Fabric: &device.Fabric{State: device.FabricInProgress}}
	w.answer(joining)
	for range 11 {
		w.wait(5 * time.Second)
		w.answer(joining)
		w.want(whole, Healthy)
	}
	w.wait(5 * time.Second)
	w.answer(joining)
	w.want(whole, Unhealthy)
	w.want(whole+"-mig-19-0", Healthy) // partitions do without
	w.answer(device.Condition{Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}})
	w.want(whole, Degraded)
	w.answer(device.Condition{Fabric: &device.Fabric{State: device.FabricCompleted}})
	w.want(whole, Healthy)
}

func TestAMilderFindingStaysBesideAGraverOne(t *testing.T) {
	w := watch(t, Options{})
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	degraded := w.now
	w.pass(time.Hour)
	w.xid(95)
	broken := w.now
	w.pass(time.Hour)
	w.answer(device.Condition{Reach: device.ReachLost})
	v := w.of(whole)
	if len(v.Causes) != 3 || v.State != Lost || v.Causes[1].State != Unhealthy || !v.Causes[1].Since.Equal(broken) || v.Causes[2].State != Degraded || !v.Causes[2].Since.Equal(degraded) {
		t.Errorf("%+v", v)
	}
}

func TestAStateNamesAnXIDBesideWhatElseCausesIt(t *testing.T) {
	w := watch(t, Options{})
	w.xid(95)
	w.wait(time.Second)
	w.xid(48)
	w.wait(time.Second)
	w.recovery(device.RecoveryReset)
	v := w.of(whole)
	if len(v.Causes) != 2 || v.Causes[0].XID != 95 || v.Causes[1].XID != 0 || v.Causes[1].Code != "recovery-gpu-reset" || v.Causes[1].State != Unhealthy {
		t.Errorf("%+v", v.Causes)
	}
}

func TestTheFirstTimeStaysWhileTheStateLasts(t *testing.T) {
	w := watch(t, Options{})
	w.recovery(device.RecoveryReset)
	first := w.now
	for range 10 {
		w.wait(time.Second)
		w.xid(95)
		w.xid(48)
		w.recovery(device.RecoveryReboot) // the first finding ends, others of its state stay
		if c := w.of(whole).Causes[0]; !c.Since.Equal(first) {
			t.Fatalf("%+v, want since %s", c, first)
		}
	}
}

func TestAnAnswerThatWasOnItsWayEndsNothingThatCameMeanwhile(t *testing.T) {
	w := watch(t, Options{})
	w.recovery(device.RecoveryReset)
	w.wait(time.Second)
	w.xid(95)
	w.wait(time.Second)
	w.answer(device.Condition{Recovery: device.RecoveryNone, Took: 1500 * time.Millisecond})
	w.want(whole, Unhealthy)
}

func TestABurstIsFewChangesAndLittleMemory(t *testing.T) {
	w := watch(t, Options{})
	before := w.Version()
	for i := range 1000 {
		w.xid([]uint64{31, 43, 13, 79, 31}[i%5])
	}
	if n := w.Version() - before; n > 4 {
		t.Errorf("1000 events of four kinds changed verdicts %d times", n)
	}
	if changes := w.Changes(); len(changes) != 4 {
		t.Errorf("%d changes are told", len(changes))
	}
	w.want(whole, Unhealthy)

	for code := range uint64(10000) {
		w.xidOn(code, 19, uint32(code%7), 1)
		w.xidOn(95, 19, uint32(code%7), 1)
	}
	if n := len(w.View().Findings(address)); n > maxFindings {
		t.Errorf("%d findings", n)
	}
	if n := len(w.Changes()); n > maxChanges {
		t.Errorf("%d changes wait", n)
	}
	if n := len(w.Counts()); n > maxCounted+1 {
		t.Errorf("%d counts", n)
	}
	for _, name := range gpu.DeviceNames() {
		w.want(name, Unhealthy)
	}
}
