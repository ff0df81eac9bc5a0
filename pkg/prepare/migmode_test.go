// A whole GPU is given out with MIG mode off, and the driver disables only a mode that it enabled.

package prepare_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

func TestWholeGPUReadsHardwareOnlyIfMIGMayBeEnabled(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, p, c)
	mustPrepare(t, p, c)
	mustUnprepare(t, p, "uid-c")
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("hardware calls: %q", calls)
	}
	plain := writesOf(t, newWorld(t), c)
	if able := writesOf(t, w, c); able != plain {
		t.Errorf("%d writes, and %d where no GPU can be cut", able, plain)
	}

	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
	h.takeCalls()
	// The inventory does not show that MIG mode is enabled. But a file on disk says that the driver
	// enabled it. So Prepare must read the hardware and disable the mode.
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"query", "MIG mode off"}) || h.of(t, gpu0).Enabled {
		t.Errorf("hardware calls: %q", calls)
	}
	r, _, err := p.Records.Load("uid-c")
	if err != nil || len(r.Steps) != 1 {
		t.Errorf("the previous version could not unprepare it: %+v, %v", r.Steps, err)
	}
	mustPrepare(t, p, c)
	mustUnprepare(t, p, "uid-c")
	mustPrepare(t, p, c)
	if calls := h.takeCalls(); len(calls) != 0 {
		t.Errorf("hardware calls although the mode is off: %q", calls)
	}
	mustUnprepare(t, p, "uid-c")

	// Now an admin has enabled MIG mode, and the inventory shows it. Prepare of the whole GPU must
	// disable it.
	h.of(t, gpu0).Enabled = true
	w.scan()
	mustPrepare(t, p, c)
	if h.of(t, gpu0).Enabled {
		t.Error("the GPU is in MIG mode")
	}
}

func writesOf(t *testing.T, w *world, c *resourceapi.ResourceClaim) int {
	t.Helper()
	p := w.plugin(t)
	w.disk.FailAt(1<<30, nil)
	mustPrepare(t, p, c)
	writes := w.disk.Writes()
	mustUnprepare(t, p, c.UID)
	return writes
}

// prepareAndUnprepare prepares and unprepares a claim with a partition. That leaves the GPU in MIG
// mode without MIG instances.
func prepareAndUnprepare(t *testing.T, p *plugin) {
	t.Helper()
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	mustUnprepare(t, p, "uid-part")
}

func prepareThen(then func(t *testing.T, w *world, h *hardware, p *plugin)) func(*testing.T, *world, *hardware, *plugin) {
	return func(t *testing.T, w *world, h *hardware, p *plugin) {
		t.Helper()
		prepareAndUnprepare(t, p)
		w.scan()
		then(t, w, h, p)
	}
}

func marks(w *world) []string { return w.disk.Names(filepath.Join(state, "mig")) }

func TestDisableUnusedMIGMode(t *testing.T) {
	for name, c := range map[string]struct {
		given func(t *testing.T, w *world, h *hardware, p *plugin)
		off   bool
		// ours is true if the driver may still disable MIG mode after this call, because it was the one
		// that enabled it.
		ours bool
	}{
		"a partition of ours enabled it": {prepareThen(func(*testing.T, *world, *hardware, *plugin) {}), true, false},
		"the inventory is stale": {func(t *testing.T, _ *world, _ *hardware, p *plugin) {
			t.Helper()
			prepareAndUnprepare(t, p)
		}, true, false},
		"an admin enabled it first": {func(t *testing.T, w *world, h *hardware, p *plugin) {
			t.Helper()
			h.of(t, gpu0).Enabled = true
			w.scan()
			prepareAndUnprepare(t, p)
		}, false, false},
		"an admin enabled it, and the inventory is stale": {func(t *testing.T, _ *world, h *hardware, p *plugin) {
			t.Helper()
			h.of(t, gpu0).Enabled = true
			prepareAndUnprepare(t, p)
		}, false, false},
		"a claim has a partition": {func(t *testing.T, _ *world, _ *hardware, p *plugin) {
			t.Helper()
			mustPrepare(t, p, newClaim("part", allocated("r", small0)))
		}, false, true},
		"a claim lost its partition at a reset": {func(t *testing.T, _ *world, h *hardware, p *plugin) {
			t.Helper()
			mustPrepare(t, p, newClaim("part", allocated("r", small0)))
			h.of(t, gpu0).RemoveInstances()
		}, false, true},
		"a claim with more devices than a file name fits": {func(t *testing.T, w *world, _ *hardware, p *plugin) {
			t.Helper()
			var all []result
			for _, place := range []string{"0", "1", "2", "3", "4", "5", "6"} {
				all = append(all, allocated("r"+place, gpu0+"-mig-19-"+place), allocated("s"+place, gpu1+"-mig-19-"+place))
			}
			mustPrepare(t, p, newClaim("many", all...))
			if names := w.records(); len(names) != 1 || strings.Contains(names[0], gpu0) {
				t.Fatalf("the record's name lists its devices: %q", names)
			}
		}, false, true},
		"an unreadable record": {prepareThen(func(t *testing.T, w *world, _ *hardware, p *plugin) {
			t.Helper()
			w.disk.Put(filepath.Join(state, "claims", "uid-x_"+gpu0+".json"), []byte("{"))
		}), false, true},
		"an admin's instance relies on the mode": {prepareThen(func(t *testing.T, _ *world, h *hardware, _ *plugin) {
			t.Helper()
			h.createForeign(t, gpu0, 14, 2)
		}), false, false},
		"after a reboot an admin's service enabled it": {prepareThen(func(t *testing.T, w *world, h *hardware, _ *plugin) {
			t.Helper()
			w.reboot()
			h.of(t, gpu0).Enabled = true
			w.scan()
		}), false, false},
		"a damaged mark": {prepareThen(func(_ *testing.T, w *world, _ *hardware, _ *plugin) {
			w.disk.Put(filepath.Join(state, "mig", gpu0), nil)
		}), false, false},
		"a call works on the GPU": {prepareThen(func(t *testing.T, _ *world, _ *hardware, p *plugin) {
			t.Helper()
			held, err := p.Locks.Acquire(t.Context(), gpu0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(held.Release)
		}), false, true},
		"a reset disabled it, and an admin enabled it again": {prepareThen(func(t *testing.T, w *world, h *hardware,
			p *plugin) {
			t.Helper()
			h.of(t, gpu0).Enabled = false
			w.scan()
			if err := p.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.of(t, gpu0).Enabled = true
			w.scan()
		}), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			h := withMIG(w)
			c.given(t, w, h, w.plugin(t))
			p := w.plugin(t)
			before := h.of(t, gpu0).State().MIG
			off, err := p.DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0))
			if err != nil || off != c.off {
				t.Errorf("disabled: %v, %v", off, err)
			}
			now := h.of(t, gpu0).State().MIG
			if now.Enabled == c.off || len(now.Instances) != len(before.Instances) {
				t.Errorf("the GPU was %+v and is %+v", before, now)
			}
			if boot, marked, err := p.Records.Marked(gpu0); err != nil || (marked && boot == w.bootID) != c.ours {
				t.Errorf("marked %v in boot %s, %v", marked, boot, err)
			}
		})
	}
}

func TestDisableUnusedMIGModeReadsNoHardwareWhenIdle(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	h.of(t, gpu0).Enabled = true // as an admin does
	w.scan()
	for _, gpu := range []string{gpu0, gpu1} {
		if off, err := p.DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu)); off || err != nil {
			t.Errorf("%s: %v, %v", gpu, off, err)
		}
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	if calls := h.takeCalls(); len(calls) > 0 {
		t.Errorf("hardware calls: %q", calls)
	}
}

func TestFailedMIGModeDisableIsRetried(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	prepareAndUnprepare(t, p)
	w.scan()
	h.of(t, gpu0).Open = []nvidia.Process{{PID: 7, Name: "dcgm"}}
	off, err := p.DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0))
	var failed *nvidia.Error
	if off || !errors.As(err, &failed) || failed.Code != device.FailureInUse || !strings.Contains(err.Error(), gpu0) {
		t.Errorf("disabled: %v, %v", off, err)
	}
	h.of(t, gpu0).Open = nil
	if off, err := w.plugin(t).DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0)); !off || err != nil || h.of(t, gpu0).Enabled {
		t.Errorf("disabled: %v, %v", off, err)
	}
	// The driver enabled MIG mode again for its next partition, so it may disable the mode again.
	w.scan()
	prepareAndUnprepare(t, p)
	w.scan()
	if off, err := p.DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0)); !off || err != nil {
		t.Errorf("disabled: %v, %v", off, err)
	}
}

// If DisableUnusedMIGMode fails at a hardware call, whichever it is, the next DisableUnusedMIGMode
// must disable MIG mode unless it is already off.
func TestInterruptedMIGModeDisableIsFinished(t *testing.T) {
	for call := 1; ; call++ {
		for _, after := range []bool{false, true} {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			prepareAndUnprepare(t, p)
			w.scan()
			h.takeCalls()
			h.fault = func(n int, late bool) error {
				if n == call && late == after {
					return &nvidia.Error{Op: "a call", Code: device.FailureDied}
				}
				return nil
			}
			_, err := p.DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0))
			if len(h.takeCalls()) < call {
				return // no call was left to fail
			}
			if err == nil {
				t.Errorf("call %d died (after its effect: %v) without an error", call, after)
			}
			h.fault = nil
			if _, err := w.plugin(t).DisableUnusedMIGMode(t.Context(), w.gpuOf(t, gpu0)); err != nil || h.of(t, gpu0).Enabled || len(marks(w)) > 0 {
				t.Errorf("after call %d died (after its effect: %v): on: %v, marks: %q, %v", call, after, h.of(t, gpu0).Enabled, marks(w), err)
			}
		}
	}
}

// On this card only a GPU reset changes the MIG mode. So the driver must not change the mode, and
// must not mark the GPU.
func TestModeThatNeedsResetIsNeverMarked(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	s := h.of(t, gpu0)
	s.NeedsReset, s.Enabled = true, true
	w.scan()
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("part", allocated("r", small0)))
	s.RemoveInstances()
	s.Enabled = false
	w.scan()
	h.takeCalls()
	if lost := reconcile.LostDevices(p.Reconcile(t.Context())); len(lost) != 1 || !strings.Contains(lost[0].Error(), "only a GPU reset") {
		t.Errorf("lost: %v", lost)
	}
	if calls := h.takeCalls(); slices.Contains(calls, "MIG mode on") {
		t.Errorf("hardware calls: %q", calls)
	}
	if names := marks(w); len(names) > 0 {
		t.Errorf("marks: %q", names)
	}
}
