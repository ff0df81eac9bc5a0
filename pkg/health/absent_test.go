package health

import (
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestCardOfAnotherDriverIsNeitherLostNorMissing(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.sendXID(79)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.wantState(gpuName, Lost)
	w.answer(device.Condition{Reach: device.ReachNotOurs})
	w.wantState(gpuName, Unhealthy) // no reset was seen
	s, _ := newStore()
	for range 2 {
		w.advance(time.Hour) // the watcher does not query a GPU of another kernel driver
		w.watcherUp("load-1")
		w.wantState(gpuName, Unhealthy)
		if missing := w.View().Missing(nil, w.now); len(missing) > 0 {
			t.Errorf("missing: %v", missing)
		}
		w = w.restart(s, nil)
		w.watcherUp("load-1")
	}
	w.answer(device.Condition{Reach: device.ReachFailed})
	if missing := w.View().Missing(nil, w.now); len(missing) != 1 {
		t.Error("want the card missing once it is queried again")
	}

	w = newTestMonitor(t, nil)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.answer(device.Condition{Reach: device.ReachNotOurs})
	w.wantState(gpuName, Healthy)
	w.answerOK()
	w.wantState(gpuName, Healthy)

	m := New(nil, start)
	m.Apply(device.Signal{Condition: &device.Condition{Card: gpu.Card(), Reach: device.ReachNotOurs}}, start)
	if len(m.cards) > 0 {
		t.Error("the monitor tracks a card that was never bound to NVIDIA's kernel driver")
	}
}

func TestRestartKeepsFindingsThatEndByTime(t *testing.T) {
	s, _ := newStore()
	w := newTestMonitor(t, nil)
	w.sendXID(144)
	since := w.now
	for range 30 {
		if err := s.Save(w.Monitor); err != nil { // the health loop saves once a minute
			t.Fatal(err)
		}
		w.healthyFor(time.Minute)
		w.sendXID(144)
	}
	m := New(nil, w.now)
	if err := s.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	m.Tick(w.now)
	if v := m.View().Of(gpu, device.Name{GPU: gpuName}); v.State != Degraded || !v.Causes[0].Since.Equal(since) {
		t.Errorf("%+v", v)
	}
	n := w.Version()
	w.healthyFor(time.Minute)
	if w.Version() != n {
		t.Error("growing counters alone changed the version of the verdicts")
	}
}

func TestLastHeardUsesThisProcessesClock(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.advance(time.Hour) // the clock was set forward
	for _, reach := range []device.Reach{device.ReachOK, device.ReachFailed} {
		c := device.Condition{Card: gpu.Card(), Reach: reach, At: w.now.Add(-time.Hour)}
		w.Apply(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, At: w.now.Add(-time.Hour)}}, w.now)
		w.Apply(device.Signal{Condition: &c}, w.now)
		w.advance(time.Second)
		w.wantState(gpuName, Healthy)
	}
}

func TestForgottenCardIsNotReportedAgain(t *testing.T) {
	w := newTestMonitor(t, nil)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.Forget(address)
	w.Changes()
	for _, reach := range []device.Reach{device.ReachLost, device.ReachFailed, device.ReachWedged} {
		w.answer(device.Condition{Reach: reach})
	}
	w.advance(time.Hour)
	if changes := w.Changes(); len(changes) > 0 || len(w.cards) > 0 {
		t.Errorf("answers about a removed card are reported: %+v", changes)
	}
	w.watcherUp("load-1")
	w.Expect([]device.GPU{gpu}, w.now) // another card is plugged in
	w.wantState(gpuName, Healthy)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.wantState(gpuName, Lost)
}
