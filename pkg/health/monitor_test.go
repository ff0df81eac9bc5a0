package health

import (
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestGPUOffTheBusIsUnhealthyUntilResetIsSeen(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.wantState(gpuName, Healthy)
	w.answerRecovery(device.RecoveryNone)
	w.sendXID(79)
	w.wantState(gpuName, Unhealthy)
	v := w.verdict(gpuName)
	if c := v.Causes[0]; c.Code != "xid-79" || !strings.Contains(c.Message(), "PCIe bus") ||
		!strings.Contains(c.Action, "power") || !c.Since.Equal(w.now) {
		t.Errorf("%+v", c)
	}
	w.answerRecovery(device.RecoveryNone)
	w.wantState(gpuName, Unhealthy) // the driver never asked for a reset, so there was none
	w.answerRecovery(device.RecoveryReset)
	w.healthyFor(24 * time.Hour)
	w.wantState(gpuName, Unhealthy)
	w.answerRecovery(device.RecoveryUnknown)
	w.wantState(gpuName, Unhealthy)
	w.answerRecovery(device.RecoveryNone)
	w.wantState(gpuName, Healthy)
}

func TestWhatEndsALatchedFinding(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(w *testMonitor)
		still State
	}{
		"time alone":                      {func(w *testMonitor) { w.healthyFor(48 * time.Hour) }, Unhealthy},
		"driver without recovery actions": {func(w *testMonitor) { w.answerRecovery(device.RecoveryUnknown) }, Unhealthy},
		"recovery action was none throughout": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryNone)
			w.answerRecovery(device.RecoveryNone)
		}, Unhealthy},
		"recovery action becomes none": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryDrainAndReset)
			w.answerRecovery(device.RecoveryUnknown)
			w.answerRecovery(device.RecoveryNone)
		}, Healthy},
		"event says recovery action is none": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryReset)
			w.sendEvent(device.HealthEvent{Kind: device.EventRecoveryAction, Recovery: device.RecoveryNone})
		}, Healthy},
		"recovery action changes": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryReset)
			w.answerRecovery(device.RecoveryReboot)
		}, Unhealthy},
		"error counter grows": {func(w *testMonitor) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(1))})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(2))})
			w.answer(device.Condition{})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(2))})
		}, Unhealthy},
		"error counter restarts": {func(w *testMonitor) {
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(1))})
			w.answer(device.Condition{Uncorrected: ptr.To(uint64(0))})
		}, Healthy},
		"energy counter restarts": {func(w *testMonitor) {
			w.answer(device.Condition{EnergyMillijoules: ptr.To(uint64(1000))})
			w.answer(device.Condition{EnergyMillijoules: ptr.To(uint64(2))})
		}, Healthy},
		"lost GPU is back":       {func(w *testMonitor) { w.answer(device.Condition{Reach: device.ReachLost}); w.answerOK() }, Healthy},
		"failing GPU answers":    {func(w *testMonitor) { w.answer(device.Condition{Reach: device.ReachFailed}); w.answerOK() }, Unhealthy},
		"hung GPU answers":       {func(w *testMonitor) { w.answer(device.Condition{Reach: device.ReachWedged}); w.answerOK() }, Unhealthy},
		"driver is loaded again": {func(w *testMonitor) { w.advance(time.Second); w.watcherUp("load-2") }, Healthy},
		"watcher restarts":       {func(w *testMonitor) { w.advance(time.Second); w.watcherUp("load-1") }, Unhealthy},
		"recovery action becomes milder, then none": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryReset)
			w.answerRecovery(device.RecoveryDrainP2P)
			w.answerRecovery(device.RecoveryNone)
		}, Healthy},
		"IMEX domain is repaired": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryIMEXDomain)
			w.answerRecovery(device.RecoveryNone)
		}, Unhealthy},
		"peer-to-peer use ends": {func(w *testMonitor) {
			w.answerRecovery(device.RecoveryDrainP2P)
			w.answerRecovery(device.RecoveryNone)
		}, Unhealthy},
		"admin clears error counters": {func(w *testMonitor) { w.answerCounters(3, 1000); w.answerCounters(0, 2000) }, Unhealthy},
		"all counters restart":        {func(w *testMonitor) { w.answerCounters(3, 1000); w.answerCounters(0, 10) }, Healthy},
		"GPU was out of reach": {func(w *testMonitor) {
			w.answerCounters(0, 1000)
			w.answer(device.Condition{Reach: device.ReachLost})
			w.answerCounters(0, 2000)
		}, Unhealthy},
		"lost GPU returns with new counters": {func(w *testMonitor) {
			w.answerCounters(0, 1000)
			w.answer(device.Condition{Reach: device.ReachLost})
			w.answerCounters(0, 10)
		}, Healthy},
		"GPU that needed a reset works": {func(w *testMonitor) {
			w.answer(device.Condition{Reach: device.ReachNeedsReset})
			w.answerOK()
		}, Healthy},
		"card was replaced": {func(w *testMonitor) {
			w.Expect([]device.GPU{{PCIAddress: address, UUID: "GPU-2"}}, w.now)
		}, Healthy},
	} {
		t.Run(name, func(t *testing.T) {
			for _, code := range []uint64{48, 64, 79, 95, 119} {
				w := newTestMonitor(t, nil)
				w.sendXID(code)
				w.advance(time.Second)
				c.end(w)
				w.wantState(gpuName, c.still)
			}
		})
	}
}

func TestApplicationErrorsKeepGPUHealthy(t *testing.T) {
	for _, code := range []uint64{8, 13, 31, 43, 45, 68, 94, 63, 92} {
		w := newTestMonitor(t, nil)
		for range 100 {
			w.sendXID(code)
			w.wantState(gpuName, Healthy)
		}
		if f := w.View().Findings(address); len(f) != 1 || f[0].Count != 100 {
			t.Errorf("XID %d: %+v", code, f)
		}
		if changes := w.Changes(); len(changes) != 1 || changes[0].Finding.Count != 1 {
			t.Errorf("XID %d is reported as %+v", code, changes)
		}
		w.healthyFor(quietPeriod + time.Second)
		if f := w.View().Findings(address); len(f) != 0 {
			t.Errorf("XID %d is still a finding after the quiet period: %+v", code, f)
		}
	}
}

func TestDegradingXIDPassesUnlessItNeedsAReset(t *testing.T) {
	for code, after := range map[uint64]State{144: Healthy, 121: Healthy, 9999: Healthy, 58: Degraded, 173: Degraded} {
		w := newTestMonitor(t, nil)
		w.sendXID(code)
		w.wantState(gpuName, Degraded)
		w.healthyFor(quietPeriod - time.Minute)
		w.sendXID(code) // restarts the quiet period
		w.healthyFor(quietPeriod - time.Minute)
		w.wantState(gpuName, Degraded)
		w.healthyFor(2 * time.Minute)
		w.wantState(gpuName, after)
	}
}

func TestRulesOverrideXIDMeanings(t *testing.T) {
	rules, errs := NewRules(map[string]Weight{"79": "app", "31": "unhealthy", "43": "degraded", "48": "ignore"}, nil)
	if errs != nil {
		t.Fatal(errs)
	}
	for code, want := range map[uint64]State{79: Healthy, 31: Unhealthy, 43: Degraded, 48: Healthy, 95: Unhealthy} {
		w := newTestMonitor(t, rules)
		w.sendXID(code)
		w.wantState(gpuName, want)
		if n := w.Counts()[EventKey{address, "xid-" + map[uint64]string{79: "79", 31: "31", 43: "43", 48: "48", 95: "95"}[code]}]; n != 1 {
			t.Errorf("XID %d was counted %d times", code, n)
		}
	}
	for code, weight := range map[string]Weight{"79": "", "": "app", "x": "app", "78": "dead", "-1": "app"} {
		if _, errs := NewRules(map[string]Weight{code: weight}, nil); errs == nil {
			t.Errorf("%q: %q is accepted", code, weight)
		}
	}
}

func TestInstanceErrorAffectsOverlappingDevices(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXIDOn(95, 19, 1, 1)
	w.wantState(gpuName+"-mig-19-1", Unhealthy)
	w.wantState(gpuName+"-mig-9-0", Unhealthy) // this partition would use the same memory
	w.wantState(gpuName, Unhealthy)
	w.wantState(gpuName+"-mig-19-0", Healthy)
	w.wantState(gpuName+"-mig-9-4", Healthy)
	if c := w.Changes(); len(c) != 1 || c[0].Device() != gpuName+"-mig-19-1" {
		t.Errorf("%+v", c)
	}
	w.answerRecovery(device.RecoveryReset)
	w.answerRecovery(device.RecoveryNone)
	w.wantState(gpuName+"-mig-19-1", Healthy)
}

func TestCardErrorAffectsAllInstances(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	for _, name := range gpu.DeviceNames() {
		w.wantState(name, Unhealthy)
	}
	w = newTestMonitor(t, nil)
	// The event does not say which placement its GPU instance has, so the error may be in any GPU
	// instance.
	w.sendEvent(device.HealthEvent{Kind: device.EventXID, XID: 95, GPUInstance: ptr.To(uint32(3))})
	for _, name := range gpu.DeviceNames() {
		w.wantState(name, Unhealthy)
	}
}

func TestComputeInstanceErrorAffectsOnlyThatInstance(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendEvent(device.HealthEvent{
		Kind: device.EventXID, XID: 95, GPUInstance: ptr.To(uint32(1)), ComputeInstance: ptr.To(uint32(2)),
		Place: &device.EventPlace{ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Part: true},
	})
	w.wantState(gpuName+"-mig-9-4-ci-2", Unhealthy)
	w.wantState(gpuName+"-mig-9-4-ci-1", Healthy)
	w.wantState(gpuName+"-mig-9-0", Healthy)
}

func TestPendingRemapDegradesUntilReset(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	w.healthyFor(100 * time.Hour) // answers without remap information
	w.wantState(gpuName, Degraded)
	w.sendXID(64)
	w.wantState(gpuName, Unhealthy)
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	w.answer(device.Condition{Remap: &device.Remap{}})
	w.wantState(gpuName, Healthy)
	w.answer(device.Condition{Remap: &device.Remap{Failed: true}})
	w.wantState(gpuName, Unhealthy)
	w.answer(device.Condition{Remap: &device.Remap{}})
	w.wantState(gpuName, Healthy)
}

func TestRecoveryActionSetsState(t *testing.T) {
	for action, want := range map[device.RecoveryAction]State{
		device.RecoveryNone: Healthy, device.RecoveryUnknown: Healthy, device.RecoveryReset: Unhealthy, device.RecoveryReboot: Unhealthy,
		device.RecoveryDrainP2P: Unhealthy, device.RecoveryDrainAndReset: Unhealthy, device.RecoveryBusReset: Unhealthy,
		device.RecoverySystemReboot: Unhealthy, device.RecoveryIMEXDomain: Degraded, device.RecoveryOther: Unhealthy, "new": Unhealthy,
	} {
		w := newTestMonitor(t, nil)
		w.answerRecovery(action)
		w.wantState(gpuName, want)
		w.answerRecovery(device.RecoveryUnknown)
		w.wantState(gpuName, want)
		w.answerRecovery(device.RecoveryNone)
		w.wantState(gpuName, Healthy)
	}
}

func TestRecoveryActionDecidesAboutDoubleBitErrors(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.wantState(gpuName, Unhealthy) // the driver reports no recovery actions
	w = newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryNone)
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.wantState(gpuName, Degraded)
	w.answerRecovery(device.RecoveryReset)
	w.wantState(gpuName, Unhealthy)
}

// An admin who released the GPUs must not read that something is wrong with them.
func TestReleasedGPUNeedsNoAttention(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.Apply(device.Signal{Watcher: &device.WatcherState{Released: true, At: w.now}}, w.now)
	if c := w.verdict(gpuName).Causes[0]; c.Action != releasedAction {
		t.Errorf("%+v", c)
	}
	w.watcherUp("load-1")
	w.answer(device.Condition{Reach: device.ReachWedged})
	if c := w.verdict(gpuName).Causes[0]; c.Action != unknownAction {
		t.Errorf("%+v", c)
	}
}

func TestSilentGPUBecomesUnknown(t *testing.T) {
	for name, c := range map[string]struct {
		say   func(w *testMonitor)
		want  State
		later State // the state half a minute later
	}{
		"no signal": {func(*testMonitor) {}, Healthy, Unknown},
		"GPU hangs": {func(w *testMonitor) { w.answer(device.Condition{Reach: device.ReachWedged}) }, Unknown, Unknown},
		"GPU answers with an error": {func(w *testMonitor) {
			w.answer(device.Condition{Reach: device.ReachFailed, Error: "busy"})
		}, Healthy, Unknown},
		"no watcher": {func(w *testMonitor) {
			w.Apply(device.Signal{Watcher: &device.WatcherState{Error: "it died", At: w.now}}, w.now)
		}, Healthy, Unknown},
		"GPU released for a driver upgrade": {func(w *testMonitor) {
			w.Apply(device.Signal{Watcher: &device.WatcherState{Released: true, At: w.now}}, w.now)
		}, Unknown, Unknown},
		"GPU lost": {func(w *testMonitor) { w.answer(device.Condition{Reach: device.ReachLost}) }, Lost, Lost},
		"lost GPU hangs": {func(w *testMonitor) {
			w.answer(device.Condition{Reach: device.ReachLost})
			w.answer(device.Condition{Reach: device.ReachWedged})
		}, Lost, Lost},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestMonitor(t, nil)
			c.say(w)
			w.wantState(gpuName, c.want)
			for range 31 {
				w.advance(time.Second)
			}
			w.wantState(gpuName, c.later)
			w.watcherUp("load-1")
			w.answerOK()
			w.wantState(gpuName, Healthy)
			w.healthyFor(time.Hour)
			w.wantState(gpuName, Healthy)
		})
	}
}

func TestGPUIsUnknownIfNoWatcherStarts(t *testing.T) {
	m := New(nil, start)
	m.Expect([]device.GPU{gpu}, start)
	m.Tick(start.Add(maxSilence - time.Second))
	if v := m.View().Of(gpu, device.Name{GPU: gpuName}); v.State != Healthy {
		t.Errorf("%+v", v)
	}
	m.Tick(start.Add(maxSilence))
	if v := m.View().Of(gpu, device.Name{GPU: gpuName}); v.State != Unknown || !strings.Contains(v.Message(), "no watcher runs") {
		t.Errorf("%+v", v)
	}
}

func TestSlowFabricJoinIsTolerated(t *testing.T) {
	w := newTestMonitor(t, nil)
	joining := device.Condition{Fabric: &device.Fabric{State: device.FabricInProgress}}
	w.answer(joining)
	for range 11 {
		w.advance(5 * time.Second)
		w.answer(joining)
		w.wantState(gpuName, Healthy)
	}
	w.advance(5 * time.Second)
	w.answer(joining)
	w.wantState(gpuName, Unhealthy)
	w.wantState(gpuName+"-mig-19-0", Healthy) // partitions do not use the fabric
	w.answer(device.Condition{Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}})
	w.wantState(gpuName, Degraded)
	w.answer(device.Condition{Fabric: &device.Fabric{State: device.FabricCompleted}})
	w.wantState(gpuName, Healthy)
}

func TestVerdictKeepsMilderCauses(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
	degraded := w.now
	w.healthyFor(time.Hour)
	w.sendXID(95)
	broken := w.now
	w.healthyFor(time.Hour)
	w.answer(device.Condition{Reach: device.ReachLost})
	v := w.verdict(gpuName)
	if len(v.Causes) != 3 || v.State != Lost || v.Causes[1].State != Unhealthy || !v.Causes[1].Since.Equal(broken) ||
		v.Causes[2].State != Degraded || !v.Causes[2].Since.Equal(degraded) {
		t.Errorf("%+v", v)
	}
}

func TestCausesAreAllFindingsTheOldestFirst(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(95)
	w.advance(time.Second)
	w.sendXID(48)
	w.advance(time.Second)
	w.answerRecovery(device.RecoveryReset)
	v := w.verdict(gpuName)
	if len(v.Causes) != 3 || v.Causes[0].XID != 95 || v.Causes[1].XID != 48 || v.Causes[2].XID != 0 ||
		v.Causes[2].Code != "recovery-gpu-reset" || v.Causes[2].State != Unhealthy {
		t.Errorf("%+v", v.Causes)
	}
}

func TestSinceStaysWhileTheStateLasts(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryReset)
	first := w.now
	for range 10 {
		w.advance(time.Second)
		w.sendXID(95)
		w.sendXID(48)
		w.answerRecovery(device.RecoveryReboot) // ends the finding recovery-gpu-reset, other Unhealthy findings remain
		if c := w.verdict(gpuName).Causes[0]; !c.Since.Equal(first) {
			t.Fatalf("%+v, want since %s", c, first)
		}
	}
}

func TestLateAnswerDoesNotEndNewerFindings(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryReset)
	w.advance(time.Second)
	w.sendXID(95)
	w.advance(time.Second)
	w.answer(device.Condition{Recovery: device.RecoveryNone, Took: 1500 * time.Millisecond})
	w.wantState(gpuName, Unhealthy)
}

func TestBurstIsBoundedInChangesAndMemory(t *testing.T) {
	w := newTestMonitor(t, nil)
	before := w.Version()
	for i := range 1000 {
		w.sendXID([]uint64{31, 43, 13, 79, 31}[i%5])
	}
	if n := w.Version() - before; n > 4 {
		t.Errorf("1000 events of four kinds changed verdicts %d times", n)
	}
	if changes := w.Changes(); len(changes) != 4 {
		t.Errorf("%d changes are reported", len(changes))
	}
	w.wantState(gpuName, Unhealthy)

	for code := range uint64(10000) {
		w.sendXIDOn(code, 19, uint32(code%7), 1)
		w.sendXIDOn(95, 19, uint32(code%7), 1)
	}
	if n := len(w.View().Findings(address)); n > maxFindings {
		t.Errorf("%d findings", n)
	}
	if n := len(w.Changes()); n > maxChanges {
		t.Errorf("%d changes are queued", n)
	}
	if n := len(w.Counts()); n > maxEventKeys+1 {
		t.Errorf("%d counts", n)
	}
	for _, name := range gpu.DeviceNames() {
		w.wantState(name, Unhealthy)
	}
}

// Application errors, which anybody who uses the GPU can cause, must not widen another finding to
// the whole GPU.
func TestManyReportsLeaveRoomForFindings(t *testing.T) {
	rules := Rules{}
	for code := range uint64(100) {
		rules[1000+code] = Reported
	}
	w := newTestMonitor(t, rules)
	for code := range uint64(100) {
		w.sendXIDOn(1000+code, 19, uint32(code%7), 1)
	}
	w.sendXIDOn(48, 19, 0, 1)
	w.wantState(gpuName+"-mig-19-0", Unhealthy)
	w.wantState(gpuName+"-mig-19-1", Healthy)
}
