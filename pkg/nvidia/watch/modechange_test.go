package watch

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestModeChangeReplacesWatcherAndLosesNoEvent(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	first := w.children[0].PID
	changed := make(chan error, 1)
	go func() {
		_, err := p.SetMode(t.Context(), s.Card(1), true)
		changed <- err
	}()
	// While the mode of GPU 1 changes, each event of another GPU must arrive exactly once.
	const events = 500
	f, err := state.Open(layout.StatePath(s.Root))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	go func() {
		for code := range events {
			_ = f.XID(3, 1000+uint64(code))
			<-time.After(time.Millisecond)
		}
	}()
	heard, done := map[uint64]int{}, false
	for len(heard) < events || !done {
		signal := w.await("an event, or a change", func(s device.Signal) bool {
			select {
			case err := <-changed:
				if err != nil {
					t.Fatal(err)
				}
				done = true
				return true
			default:
				return true
			}
		})
		switch {
		case signal.Event != nil && signal.Event.Card == s.Card(3):
			heard[signal.Event.XID] += signal.Event.Count
		case signal.Condition != nil && signal.Condition.Reach != device.ReachOK, signal.Watcher != nil && !signal.Watcher.Up:
			t.Errorf("%s", formatSignal(signal))
		}
	}
	for code, count := range heard {
		if count != 1 {
			t.Errorf("event %d arrived %d times", code, count)
		}
	}
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitListening()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(1, 45) })
	if e := w.awaitEvent(s.Card(1)); e.XID != 45 {
		t.Errorf("%+v", e)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	for _, c := range w.children {
		if c.PID == first {
			t.Error("the watcher was not replaced")
		}
	}
}

func TestModeChangeEndsWhenTheGPUIsWatchedAgain(t *testing.T) {
	s := nvidiatest.NewSite(t, "dgx-h100", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	if _, err := p.SetMode(t.Context(), s.Card(1), true); err != nil {
		t.Fatal(err)
	}
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XID(1, 45) })
	if e := w.awaitEvent(s.Card(1)); e.XID != 45 {
		t.Errorf("%+v", e)
	}
}

func TestConcurrentModeChangesShareWatcherReplacements(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	record, started := recorded(t)
	w, p := newWatchedSite(s, record)
	w.awaitListening()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			if _, err := p.SetMode(t.Context(), s.Card(i), true); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i := range 8 {
		w.awaitCondition(s.Card(i), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	}
	// One new watcher process may serve several mode changes. Otherwise 17 would start: the first
	// one, and two for each of the eight changes. The test allows 12, because the number depends on
	// how many changes begin at about the same time.
	if count := len(started()); count > 12 {
		t.Errorf("%d processes were started", count)
	}
}

func TestInstanceWithXIDCanBeDestroyed(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	c := s.Changer(p, 1)
	c.Mode(true)
	made := c.Make(14, device.Placement{Start: 2, Size: 2})
	w.awaitCondition(c.Card, func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
	w.awaitListening()
	s.Change(func(_ *layout.Config, f *state.File) error { return f.XIDOn(1, made.ID, made.Compute[0].ID, 94) })
	if e := w.awaitEvent(c.Card); e.Place == nil || e.Place.ProfileID != 14 || e.Place.Placement != made.Placement || e.Place.Part {
		t.Errorf("place is %+v", e.Place)
	}
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.Patience)
	defer cancel()
	if err := c.Destroy(ctx, c.Card, made); err != nil {
		t.Fatal(err)
	}
}

func TestModeChangeNamesForeignProcess(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	pid, end := s.Foreign("hold", 1)
	refused := make(chan error, 1)
	go func() {
		_, err := p.SetMode(t.Context(), s.Card(1), true)
		refused <- err
	}()
	began := time.Now()
	s.Changer(p, 2).Mode(true)
	other := time.Since(began)
	nvidiatest.RefusedBy(t, <-refused, pid)
	if other > nvidiatest.Patience/2 {
		t.Errorf("another GPU took %s", other)
	}
	end()
	s.Changer(p, 1).Mode(true)
	w.awaitCondition(s.Card(1), func(c device.Condition) bool { return c.MIG != nil && c.MIG.Enabled })
}

func TestDestroyNamesForeignSubscriber(t *testing.T) {
	s := nvidiatest.NewSite(t, "awkward", layout.Container, "")
	w, p := newWatchedSite(s, nil)
	w.awaitListening()
	c := s.Changer(p, 1)
	c.Mode(true)
	made := c.Make(14, device.Placement{Start: 2, Size: 2})
	pid, end := s.Foreign("subscribe", 1)
	c.Remove(c.Make(14, device.Placement{Start: 4, Size: 2})) // the other process has not opened this MIG instance
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	nvidiatest.RefusedBy(t, c.Destroy(ctx, c.Card, made), pid)
	time.AfterFunc(100*time.Millisecond, end)
	c.Remove(made)
}
