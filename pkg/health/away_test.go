package health

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestACardThatAnotherDriverHasIsNeitherLostNorMissing(t *testing.T) {
	w := watch(t, Options{})
	w.xid(79)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.want(whole, Lost)
	w.answer(device.Condition{Reach: device.ReachNotOurs})
	w.want(whole, Unhealthy) // what takes a reset was not seen to have had one
	s, _ := onDisk()
	for range 2 {
		w.wait(time.Hour) // nobody asks it
		w.listen("load-1")
		w.want(whole, Unhealthy)
		if missing, settled := w.View().Missing(nil, w.now); len(missing) > 0 || !settled {
			t.Errorf("%v are missing", missing)
		}
		w = w.restarted(s, Options{})
		w.listen("load-1")
	}
	w.answer(device.Condition{Reach: device.ReachFailed})
	if missing, _ := w.View().Missing(nil, w.now); len(missing) != 1 {
		t.Error("one that is asked again is not missing")
	}

	w = watch(t, Options{})
	w.answer(device.Condition{Reach: device.ReachLost})
	w.answer(device.Condition{Reach: device.ReachNotOurs})
	w.want(whole, Healthy)
	w.ok()
	w.want(whole, Healthy)

	m := New(Options{}, start)
	m.Apply(device.Signal{Condition: &device.Condition{Card: gpu.Card(), Reach: device.ReachNotOurs}}, start)
	if len(m.cards) > 0 {
		t.Error("a card that was never ours is remembered")
	}
}

func TestWhatPassesByItselfDoesNotPassInARestart(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	saved := w.Edition() - 1
	save := func() { // as who keeps the file does: when the version is another one
		if w.Edition() != saved {
			if err := s.Save(w.Monitor); err != nil {
				t.Fatal(err)
			}
			saved = w.Edition()
		}
	}
	w.xid(144)
	since := w.now
	for range 30 {
		save()
		w.pass(time.Minute)
		w.xid(144)
	}
	m := New(Options{}, w.now)
	if err := s.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	m.Tick(w.now)
	if v := m.View().Of(gpu, device.Name{GPU: whole}); v.State != Degraded || !v.Causes[0].Since.Equal(since) {
		t.Errorf("%+v", v)
	}
	n := w.Edition()
	for range 50 {
		w.wait(time.Second)
		w.counts(0, uint64(w.now.Unix()))
	}
	if n = w.Edition() - n; n == 0 || n > 3 {
		t.Errorf("%d editions for a hundred seconds of counters that grow", n)
	}
}

func TestWhenACardWasHeardOfIsByThisProcessesClock(t *testing.T) {
	w := watch(t, Options{})
	w.wait(time.Hour) // somebody has set the clock
	for _, reach := range []device.Reach{device.ReachOK, device.ReachFailed} {
		c := device.Condition{Card: gpu.Card(), Reach: reach, At: w.now.Add(-time.Hour)}
		w.Apply(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, At: w.now.Add(-time.Hour)}}, w.now)
		w.Apply(device.Signal{Condition: &c}, w.now)
		w.wait(time.Second)
		w.want(whole, Healthy)
	}
}

func TestAForgottenCardDoesNotComeBackAsAGhost(t *testing.T) {
	w := watch(t, Options{})
	w.answer(device.Condition{Reach: device.ReachLost})
	w.Forget(address)
	w.Changes()
	for _, reach := range []device.Reach{device.ReachLost, device.ReachFailed, device.ReachWedged} {
		w.answer(device.Condition{Reach: reach})
	}
	w.wait(time.Hour)
	if told := w.Changes(); len(told) > 0 || len(w.cards) > 0 {
		t.Errorf("who listens goes on to ask a card that was taken out: %+v", told)
	}
	w.listen("load-1")
	w.Expect([]device.GPU{gpu}, w.now) // another one is in
	w.want(whole, Healthy)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.want(whole, Lost)

	for i := range 3 * maxCards {
		a := device.PCIAddress(fmt.Sprintf("%04x:00:00.0", i))
		w.Apply(device.Signal{Condition: &device.Condition{Card: device.Card{PCIAddress: a}, Reach: device.ReachOK}}, w.now)
		w.Forget(a)
	}
	if len(w.forgotten) > maxCards {
		t.Errorf("%d places are remembered", len(w.forgotten))
	}
}
