package health

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// oracle is a simple model to compare the monitor with. broken has the devices that must be
// Unhealthy or Lost, each with the time when that began. recovery is the recovery action that the
// driver last reported.
type oracle struct {
	broken   map[string]time.Time
	recovery device.RecoveryAction
}

func (o *oracle) markBroken(now time.Time, names ...string) {
	for _, n := range names {
		for _, device := range []string{n, n + "-share"} {
			if _, is := o.broken[device]; !is {
				o.broken[device] = now
			}
		}
	}
}

// The test plays random hardware events and compares the monitor's verdicts with the oracle after
// each of them. At random moments it restarts the plugin: a saved and loaded monitor must give the
// same verdicts with the same times.
func TestRandomFaultsAreNeverHidden(t *testing.T) {
	names := gpu.DeviceNames()
	var parsed []device.Name
	for _, text := range names {
		n, ok := device.ParseName(text)
		if !ok {
			t.Fatal(text)
		}
		parsed = append(parsed, n)
	}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		disk := durabletest.New()
		store := Store{Disk: disk, Path: "/state/health.json", BootID: "boot"}
		w := newTestMonitor(t, nil)
		o := oracle{broken: map[string]time.Time{}}
		var trace []string
		for range 120 {
			w.now = w.now.Add(time.Duration(1+r.IntN(4000)) * time.Millisecond)
			var step string
			switch r.IntN(14) {
			case 0:
				step = "xid 95"
				w.sendXID(95)
				o.markBroken(w.now, names...)
			case 1:
				slice := uint32(r.IntN(7))
				step = fmt.Sprintf("xid 48 on slice %d", slice)
				w.sendXIDOn(48, 19, slice, 1)
				o.markBroken(w.now, fmt.Sprintf("%s-mig-19-%d", gpuName, slice), fmt.Sprintf("%s-mig-9-%d", gpuName, slice/4*4),
					gpuName+"-mig-0-0", gpuName)
			case 2:
				step = "application errors and unknown XIDs"
				w.sendXID(31)
				w.sendXIDOn(43, 19, 2, 1)
				w.sendXID(uint64(1000 + r.IntN(50)))
			case 3:
				step = "the driver asks for a reset"
				w.answerRecovery(device.RecoveryReset)
				o.recovery = device.RecoveryReset
				o.markBroken(w.now, names...)
			case 4:
				step = "the driver asks for nothing"
				w.answerRecovery(device.RecoveryNone)
				if o.recovery == device.RecoveryReset {
					clear(o.broken)
				}
				o.recovery = device.RecoveryNone
			case 5:
				step = "the driver reports no action"
				w.answerRecovery(device.RecoveryUnknown)
			case 6:
				step = "the error counter grows"
				w.answer(device.Condition{Uncorrected: ptr.To(uint64(w.now.Unix()))})
			case 7:
				step = "the GPU hangs"
				w.answer(device.Condition{Reach: device.ReachWedged})
			case 8:
				step = "the GPU fails"
				w.answer(device.Condition{Reach: device.ReachFailed})
			case 9:
				step = "a remap is pending"
				w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
			case 10:
				step = "a long time passes"
				w.advance(time.Duration(r.IntN(48)) * time.Hour)
				w.watcherUp(w.driver)
			case 11:
				step = "the driver is loaded again"
				load := fmt.Sprint("load-", seed, w.now)
				w.watcherUp(load)
				asks := o.recovery == device.RecoveryReset
				// The driver was loaded again and reports the same recovery action as before.
				w.answerRecovery(o.recovery)
				clear(o.broken)
				if asks {
					o.markBroken(start, names...)
				}
				w.watcherUp(load)
			case 12:
				step = "the plugin is restarted"
				before := map[string]Verdict{}
				for _, n := range names {
					before[n] = w.verdict(n)
				}
				if err := store.Save(w.Monitor); err != nil {
					t.Fatal(err)
				}
				w.Monitor = New(nil, w.now)
				if err := store.Load(w.Monitor, w.now); err != nil {
					t.Fatal(err)
				}
				for _, n := range names {
					sameVerdict(t, n, before[n], w.verdict(n))
				}
				w.watcherUp(w.driver)
			default:
				step = "the GPU is fine"
				w.answerOK()
			}
			trace = append(trace, step)
			view := w.View()
			for i, n := range names {
				v := view.Of(gpu, parsed[i])
				since, is := o.broken[n]
				if is && v.State < Unhealthy || !is && v.State >= Unhealthy {
					t.Fatalf("seed %d: %s is %s (%s), broken %v, after %q", seed, n, v.State, v.Message(), is, trace[max(0, len(trace)-8):])
				}
				if !is || since.Equal(start) {
					continue
				}
				// Of all findings with the state Unhealthy, the oldest comes first.
				unhealthy := slices.IndexFunc(v.Causes, func(f Finding) bool { return f.State == Unhealthy })
				if unhealthy >= 0 && v.Causes[unhealthy].Since.After(since) {
					t.Fatalf("seed %d: %s is broken since %s, but its cause says %s, after %q", seed, n, since, v.Causes[unhealthy].Since, trace)
				}
			}
			if n := len(w.View().Findings(address)); n > maxFindings {
				t.Fatalf("seed %d: %d findings", seed, n)
			}
		}
	}
}

func sameVerdict(t *testing.T, name string, a, b Verdict) {
	t.Helper()
	same := a.State == b.State && len(a.Causes) == len(b.Causes)
	for i := 0; same && i < len(a.Causes); i++ {
		x, y := a.Causes[i], b.Causes[i]
		same = x.Code == y.Code && x.State == y.State && x.Since.Equal(y.Since) && x.Message() == y.Message()
	}
	if !same {
		t.Errorf("%s was\n%+v, and after a restart\n%+v", name, a, b)
	}
}

func TestExcessLatchedFindingsAreMerged(t *testing.T) {
	rules := Rules{}
	for code := range uint64(500) {
		rules[1000+code] = Breaking
	}
	w := newTestMonitor(t, rules)
	for code := range uint64(500) {
		w.sendXIDOn(1000+code, 19, uint32(code%7), 1)
		w.wantState(fmt.Sprintf("%s-mig-19-%d", gpuName, code%7), Unhealthy)
	}
	// The GPU has as many findings that need a reset as a card may have. A finding from a query must
	// still be added, and must end when the hardware no longer reports it.
	w.answerCounters(0, 1)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.wantState(gpuName, Lost)
	w.answerCounters(0, 2)
	w.wantState(gpuName, Unhealthy)
	w.answer(device.Condition{Reach: device.ReachNeedsReset})
	w.answerCounters(0, 3)
	for code := range uint64(500) {
		w.sendXIDOn(1000+code, 19, uint32(code%7), 1)
	}
	if n := len(w.View().Findings(address)); n > maxFindings {
		t.Errorf("%d findings", n)
	}
	s, _ := newStore()
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	before := w.View()
	w.Monitor = New(rules, w.now)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	for _, name := range gpu.DeviceNames() {
		n, _ := device.ParseName(name)
		sameVerdict(t, name, before.Of(gpu, n), w.verdict(name))
	}
	w.watcherUp("load-1")
	w.healthyFor(24 * time.Hour)
	for _, n := range gpu.DeviceNames() {
		w.wantState(n, Unhealthy)
	}
	w.answerRecovery(device.RecoveryReset)
	w.answerRecovery(device.RecoveryNone)
	w.wantState(gpuName, Healthy)
}
