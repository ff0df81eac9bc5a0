package health

import (
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestAGPUThatNeedsAResetIsTakenOutUntilItWorks(t *testing.T) {
	w := watch(t, Options{})
	w.answer(device.Condition{Reach: device.ReachNeedsReset, Error: "GPU requires reset"})
	w.want(whole, Unhealthy)
	since := w.now
	for range 20 {
		w.wait(5 * time.Second)
		w.answer(device.Condition{Reach: device.ReachNeedsReset, Error: "GPU requires reset"})
	}
	if v := w.of(whole); v.State != Unhealthy || len(v.Causes) != 1 || v.Causes[0].Code != "reset-required" || !v.Causes[0].Since.Equal(since) {
		t.Errorf("%+v", v)
	}
	w.ok()
	w.want(whole, Healthy)
}

func TestWhatAFailingAnswerSaysCounts(t *testing.T) {
	for what, c := range map[string]device.Condition{
		"the driver asks for a reset": {Recovery: device.RecoveryReset},
		"no spare memory is left":     {Remap: &device.Remap{Failed: true}},
	} {
		w := watch(t, Options{})
		c.Reach, c.Error = device.ReachFailed, "energy: unknown error"
		w.answer(c)
		if w.want(whole, Unhealthy); t.Failed() {
			t.Fatal(what)
		}
		w.answer(device.Condition{Reach: device.ReachFailed, Recovery: device.RecoveryNone, Remap: &device.Remap{}})
		w.want(whole, Unhealthy) // only a full answer ends anything
		w.answer(device.Condition{Recovery: device.RecoveryNone, Remap: &device.Remap{}})
		w.want(whole, Healthy)
	}
}

func TestAPendingRemapOfAFailingAnswerDegrades(t *testing.T) {
	w := watch(t, Options{})
	w.answer(device.Condition{Reach: device.ReachFailed, Remap: &device.Remap{Pending: true}})
	w.want(whole, Degraded)
}

func TestACardThatIsCutNeedsNoFabric(t *testing.T) {
	joining, cut := device.Condition{Fabric: &device.Fabric{State: device.FabricInProgress}}, device.Condition{Fabric: &device.Fabric{State: device.FabricNotUsed}}
	w := watch(t, Options{})
	w.answer(joining)
	w.wait(5 * time.Second)
	w.answer(cut)
	w.pass(10 * time.Minute)
	w.want(whole, Healthy)
	for _, bad := range []device.Condition{joining, {Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}}} {
		w.answer(bad)
		w.pass(2 * time.Minute) // answers that do not say end nothing
		if v := w.of(whole); v.State == Healthy {
			t.Errorf("%+v: %+v", bad.Fabric, v)
		}
		w.answer(cut)
		w.want(whole, Healthy)
	}
}

func TestAMemoryErrorIsNotMadeMilderByTheNext(t *testing.T) {
	s, _ := onDisk()
	before := watch(t, Options{})
	before.event(device.HealthEvent{Kind: device.EventDoubleBitECC}) // of a driver without an opinion
	if err := s.Save(before.Monitor); err != nil {
		t.Fatal(err)
	}
	w := watch(t, Options{})
	w.recovery(device.RecoveryNone)
	w.wait(time.Second)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	w.want(whole, Unhealthy)
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.pass(time.Hour)
	w.want(whole, Unhealthy)
}

func TestAMemoryErrorBeforeTheFirstAnswerIsTheDriversToJudge(t *testing.T) {
	w := watch(t, Options{})
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.want(whole, Unhealthy)
	first := w.now
	w.wait(time.Second)
	w.recovery(device.RecoveryNone) // so it has an opinion
	w.want(whole, Degraded)
	if c := w.of(whole).Causes[0]; !c.Since.Equal(first) {
		t.Errorf("%+v", c)
	}
	w.pass(DefaultQuiet + time.Minute)
	w.want(whole, Healthy)

	// Without an opinion of the driver each is as grave as the first, whatever came before.
	w = watch(t, Options{})
	w.recovery(device.RecoveryNone)
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.want(whole, Degraded)
	w.wait(time.Second)
	w.listen("load-2") // of an older driver
	w.event(device.HealthEvent{Kind: device.EventDoubleBitECC})
	w.want(whole, Unhealthy)
	w.pass(time.Hour)
	w.want(whole, Unhealthy)
}

func TestALevelThatNobodyAnswersAnyMoreEndsWithTheReset(t *testing.T) {
	for what, c := range map[string]device.Condition{
		"recovery": {Recovery: device.RecoveryReset},
		"remap":    {Remap: &device.Remap{Failed: true}},
		"fabric":   {Fabric: &device.Fabric{State: device.FabricCompleted, Error: "no route"}},
	} {
		w := watch(t, Options{})
		w.answer(c)
		w.pass(time.Hour)
		if v := w.of(whole); v.State == Healthy {
			t.Errorf("%s: a driver that says nothing has ended %+v", what, c)
		}
		w.listen("load-2") // an older one, which has no word for it
		w.pass(time.Minute)
		if v := w.of(whole); v.State != Healthy {
			t.Errorf("%s: %s", what, v.Message())
		}
	}
	w := watch(t, Options{})
	w.answer(device.Condition{Reach: device.ReachLost})
	w.wait(time.Second)
	w.listen("load-2")
	w.want(whole, Lost) // a reload alone brings no card back
}
