package prepare

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// gpuOf is the GPU as the inventory saw it last.
func (w *world) gpuOf(t *testing.T, name string) device.GPU {
	t.Helper()
	for _, g := range w.snapshot.Node.GPUs {
		if g.WholeName() == name {
			return g.GPU
		}
	}
	t.Fatalf("the inventory has no %s", name)
	return device.GPU{}
}

// cutAndGivenBack leaves a GPU in MIG mode, without instances.
func cutAndGivenBack(t *testing.T, p *Preparer) {
	t.Helper()
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
}

func marks(w *world) []string { return w.disk.Names(filepath.Join(state, "mig")) }

func TestModeOffTurnsOffOnlyWhatWeTurnedOnAndNobodyUses(t *testing.T) {
	for name, c := range map[string]struct {
		given func(t *testing.T, w *world, h *hardware, p *Preparer)
		off   bool
		// ours says that the mode stays ours to turn off.
		ours bool
	}{
		"a cut of ours turned it on": {cutAfter(func(*testing.T, *world, *hardware, *Preparer) {}), true, false},
		"the inventory has not seen the mode yet": {func(t *testing.T, _ *world, _ *hardware, p *Preparer) {
			t.Helper()
			cutAndGivenBack(t, p)
		}, true, false},
		"an admin had turned it on before the cut": {func(t *testing.T, w *world, h *hardware, p *Preparer) {
			t.Helper()
			h.of(t, gpu0).on = true
			w.scan()
			cutAndGivenBack(t, p)
		}, false, false},
		"an admin had turned it on, and the inventory had not seen it": {func(t *testing.T, _ *world, h *hardware, p *Preparer) {
			t.Helper()
			h.of(t, gpu0).on = true
			cutAndGivenBack(t, p)
		}, false, false},
		"a claim holds a partition": {func(t *testing.T, _ *world, _ *hardware, p *Preparer) {
			t.Helper()
			mustPrepare(t, p, newClaim("part", allocated("r", small0)))
		}, false, true},
		"a claim holds a partition that a reset took": {func(t *testing.T, _ *world, h *hardware, p *Preparer) {
			t.Helper()
			mustPrepare(t, p, newClaim("part", allocated("r", small0)))
			h.of(t, gpu0).reset()
		}, false, true},
		"a claim with more devices than a name has room for": {func(t *testing.T, w *world, _ *hardware, p *Preparer) {
			t.Helper()
			var all []result
			for _, place := range []string{"0", "1", "2", "3", "4", "5", "6"} {
				all = append(all, allocated("r"+place, gpu0+"-mig-19-"+place), allocated("s"+place, gpu1+"-mig-19-"+place))
			}
			mustPrepare(t, p, newClaim("many", all...))
			if names := w.records(); len(names) != 1 || strings.Contains(names[0], gpu0) {
				t.Fatalf("the record's name tells its devices: %q", names)
			}
		}, false, true},
		"a record that cannot be read": {cutAfter(func(t *testing.T, w *world, _ *hardware, p *Preparer) {
			t.Helper()
			w.disk.Put(filepath.Join(state, "claims", "uid-x_"+gpu0+".json"), []byte("{"))
		}), false, true},
		"an admin's instance is there, who relies on the mode": {cutAfter(func(t *testing.T, _ *world, h *hardware, _ *Preparer) {
			t.Helper()
			h.someoneElse(t, gpu0, 14, 2)
		}), false, false},
		"the node was started again, and an admin's service turned it on": {cutAfter(func(t *testing.T, w *world, h *hardware, _ *Preparer) {
			t.Helper()
			w.reboot()
			h.of(t, gpu0).on = true
			w.scan()
		}), false, false},
		"a mark of an earlier version": {cutAfter(func(_ *testing.T, w *world, _ *hardware, _ *Preparer) {
			w.disk.Put(filepath.Join(state, "mig", gpu0), nil)
		}), false, false},
		"a call works on the GPU": {cutAfter(func(t *testing.T, _ *world, _ *hardware, p *Preparer) {
			t.Helper()
			held, err := p.Locks.Acquire(t.Context(), gpuLocks(gpu0)...)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(held.Release)
		}), false, true},
		"a reset turned it off, and an admin on again, which the comparison has seen": {cutAfter(func(t *testing.T, w *world, h *hardware, p *Preparer) {
			t.Helper()
			h.of(t, gpu0).on = false
			w.scan()
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.of(t, gpu0).on = true
			w.scan()
		}), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			h := withMIG(w)
			c.given(t, w, h, w.plugin(t))
			p := w.plugin(t)
			before := h.of(t, gpu0).state().MIG
			off, err := p.ModeOff(t.Context(), w.gpuOf(t, gpu0))
			if err != nil || off != c.off {
				t.Errorf("turned off: %v, %v", off, err)
			}
			now := h.of(t, gpu0).state().MIG
			if now.Enabled == c.off || len(now.Instances) != len(before.Instances) {
				t.Errorf("the GPU was %+v and is %+v", before, now)
			}
			if ours, err := p.Records.MarkedIn(gpu0, w.bootID); err != nil || ours != c.ours {
				t.Errorf("ours: %v, %v", ours, err)
			}
		})
	}
}

func cutAfter(then func(t *testing.T, w *world, h *hardware, p *Preparer)) func(*testing.T, *world, *hardware, *Preparer) {
	return func(t *testing.T, w *world, h *hardware, p *Preparer) {
		t.Helper()
		cutAndGivenBack(t, p)
		w.scan()
		then(t, w, h, p)
	}
}

func TestModeOffThatFailsIsSaidAndTriedAgain(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	cutAndGivenBack(t, p)
	w.scan()
	h.of(t, gpu0).open = []nvidia.Process{{PID: 7, Name: "dcgm"}}
	off, err := p.ModeOff(t.Context(), w.gpuOf(t, gpu0))
	var cut *nvidia.CutError
	if off || !errors.As(err, &cut) || cut.Code != nvidia.CodeInUse || !strings.Contains(err.Error(), gpu0) {
		t.Errorf("turned off: %v, %v", off, err)
	}
	h.of(t, gpu0).open = nil
	if off, err := w.plugin(t).ModeOff(t.Context(), w.gpuOf(t, gpu0)); !off || err != nil || h.of(t, gpu0).on {
		t.Errorf("turned off: %v, %v", off, err)
	}
	// Cut again, it is ours again.
	w.scan()
	cutAndGivenBack(t, p)
	w.scan()
	if off, err := p.ModeOff(t.Context(), w.gpuOf(t, gpu0)); !off || err != nil {
		t.Errorf("turned off: %v, %v", off, err)
	}
}

// A call that dies anywhere leaves a mode that the next one turns off, or that is off.
func TestModeOffIsFinishedByTheNextCallWhereverItDied(t *testing.T) {
	for call := 1; ; call++ {
		for _, after := range []bool{false, true} {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			cutAndGivenBack(t, p)
			w.scan()
			h.asked()
			h.fault = func(n int, late bool) error {
				if n == call && late == after {
					return &nvidia.CutError{Op: "a call", Code: nvidia.CodeDied}
				}
				return nil
			}
			_, err := p.ModeOff(t.Context(), w.gpuOf(t, gpu0))
			if len(h.asked()) < call {
				return // every call has died once
			}
			if err == nil {
				t.Errorf("call %d died (after its effect: %v), and nothing was said", call, after)
			}
			h.fault = nil
			if _, err := w.plugin(t).ModeOff(t.Context(), w.gpuOf(t, gpu0)); err != nil || h.of(t, gpu0).on || len(marks(w)) > 0 {
				t.Errorf("after call %d died (after its effect: %v): on: %v, marks: %q, %v", call, after, h.of(t, gpu0).on, marks(w), err)
			}
		}
	}
}

func TestModeOffAsksNothingWhereNothingIsToBeDone(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	h.of(t, gpu0).on = true // an admin's
	w.scan()
	for _, gpu := range []string{gpu0, gpu1} {
		if off, err := p.ModeOff(t.Context(), w.gpuOf(t, gpu)); off || err != nil {
			t.Errorf("%s: %v, %v", gpu, off, err)
		}
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	if calls := h.asked(); len(calls) > 0 {
		t.Errorf("asked: %q", calls)
	}
}

// Only a reset changes the mode of such a card, so it is never switched and never marked.
func TestAModeThatOnlyAResetChangesIsNeverMarked(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	s := h.of(t, gpu0)
	s.fixed, s.on = true, true
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	s.reset()
	s.on = false
	w.scan()
	h.asked()
	if lost := Lost(p.Reconcile(t.Context())); len(lost) != 1 || !strings.Contains(lost[0].Error(), "only a reset") {
		t.Errorf("lost: %v", lost)
	}
	if calls := h.asked(); slices.Contains(calls, "set MIG mode true") {
		t.Errorf("asked: %q", calls)
	}
	if names := marks(w); len(names) > 0 {
		t.Errorf("marks: %q", names)
	}
}
