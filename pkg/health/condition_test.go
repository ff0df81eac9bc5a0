package health

import (
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestGPUThatNeedsResetStaysUnhealthyUntilItWorks(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Reach: device.ReachNeedsReset, Error: "GPU requires reset"})
	w.wantState(gpuName, Unhealthy)
	since := w.now
	for range 20 {
		w.advance(5 * time.Second)
		w.answer(device.Condition{Reach: device.ReachNeedsReset, Error: "GPU requires reset"})
	}
	if v := w.verdict(gpuName); v.State != Unhealthy || len(v.Causes) != 1 || v.Causes[0].Code != "reset-required" ||
		!v.Causes[0].Since.Equal(since) {
		t.Errorf("%+v", v)
	}
	w.answerOK()
	w.wantState(gpuName, Healthy)
}

func TestFailingAnswerStillReportsFaults(t *testing.T) {
	for what, c := range map[string]device.Condition{
		"the driver asks for a reset": {Recovery: device.RecoveryReset},
		"no spare memory is left":     {Remap: &device.Remap{Failed: true}},
	} {
		w := newTestMonitor(t, nil)
		c.Reach, c.Error = device.ReachFailed, "energy: unknown error"
		w.answer(c)
		if w.wantState(gpuName, Unhealthy); t.Failed() {
			t.Fatal(what)
		}
		w.answer(device.Condition{Reach: device.ReachFailed, Recovery: device.RecoveryNone, Remap: &device.Remap{}})
		w.wantState(gpuName, Unhealthy) // only a full answer ends a finding
		w.answer(device.Condition{Recovery: device.RecoveryNone, Remap: &device.Remap{}})
		w.wantState(gpuName, Healthy)
	}
}

func TestPendingRemapInFailingAnswerDegrades(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Reach: device.ReachFailed, Remap: &device.Remap{Pending: true}})
	w.wantState(gpuName, Degraded)
}

func TestCardInMIGModeNeedsNoFabric(t *testing.T) {
	joining := device.Condition{Fabric: &device.Fabric{State: device.FabricInProgress}}
	cut := device.Condition{Fabric: &device.Fabric{State: device.FabricNotUsed}}
	w := newTestMonitor(t, nil)
	w.answer(joining)
	w.advance(5 * time.Second)
	w.answer(cut)
	w.healthyFor(10 * time.Minute)
	w.wantState(gpuName, Healthy)
	for _, bad := range []device.Condition{joining, {Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}}} {
		w.answer(bad)
		w.healthyFor(2 * time.Minute) // answers without fabric information end nothing
		if v := w.verdict(gpuName); v.State == Healthy {
			t.Errorf("%+v: %+v", bad.Fabric, v)
		}
		w.answer(cut)
		w.wantState(gpuName, Healthy)
	}
}

func TestLaterMemoryErrorDoesNotDowngradeFinding(t *testing.T) {
	s, _ := newStore()
	before := newTestMonitor(t, nil)
	// The driver has not reported a recovery action yet, so the memory error must last until a reset.
	before.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	if err := s.Save(before.Monitor); err != nil {
		t.Fatal(err)
	}
	w := newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryNone)
	w.advance(time.Second)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	w.wantState(gpuName, Unhealthy)
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.healthyFor(time.Hour)
	w.wantState(gpuName, Unhealthy)
}

func TestFirstRecoveryActionRejudgesMemoryErrors(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.wantState(gpuName, Unhealthy)
	first := w.now
	w.advance(time.Second)
	w.answerRecovery(device.RecoveryNone) // the driver reports recovery actions
	w.wantState(gpuName, Degraded)
	if c := w.verdict(gpuName).Causes[0]; !c.Since.Equal(first) {
		t.Errorf("%+v", c)
	}
	w.healthyFor(quietPeriod + time.Minute)
	w.wantState(gpuName, Healthy)

	// At the end, a driver is loaded that reports no recovery actions. So a memory error must again
	// make the GPU Unhealthy until a reset.
	w = newTestMonitor(t, nil)
	w.answerRecovery(device.RecoveryNone)
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.wantState(gpuName, Degraded)
	w.advance(time.Second)
	w.watcherUp("load-2") // an older driver was loaded
	w.sendEvent(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.wantState(gpuName, Unhealthy)
	w.healthyFor(time.Hour)
	w.wantState(gpuName, Unhealthy)
}

func TestResetEndsLevelsThatTheDriverStopsReporting(t *testing.T) {
	for what, c := range map[string]device.Condition{
		"recovery": {Recovery: device.RecoveryReset},
		"remap":    {Remap: &device.Remap{Failed: true}},
		"fabric":   {Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}},
	} {
		w := newTestMonitor(t, nil)
		w.answer(c)
		w.healthyFor(time.Hour)
		if v := w.verdict(gpuName); v.State == Healthy {
			t.Errorf("%s: an answer without information ended %+v", what, c)
		}
		w.watcherUp("load-2") // an older driver, which does not report this condition
		w.healthyFor(time.Minute)
		if v := w.verdict(gpuName); v.State != Healthy {
			t.Errorf("%s: %s", what, v.Message())
		}
	}
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.advance(time.Second)
	w.watcherUp("load-2")
	w.wantState(gpuName, Lost) // a driver reload alone does not bring a card back
}
