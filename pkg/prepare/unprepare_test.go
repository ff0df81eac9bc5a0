// Unprepare gives everything back, without a GPU driver unless the claim's steps changed hardware.

package prepare_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

func TestUnprepareNeedsNeitherDriverNorGPU(t *testing.T) {
	oneGPU := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[:1] }
	anew := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:] }
	lost := func(h *hardware) {
		h.fault = func(int, bool) error {
			return &nvidia.Error{Op: "query", Code: device.FailureLost, Message: "the GPU is lost"}
		}
	}
	for name, c := range map[string]struct {
		node func(*world)
		gone func(*testing.T, *world, *hardware)
	}{
		"the driver is not loaded": {nil, func(_ *testing.T, w *world, h *hardware) {
			w.snapshot.Ready = false
			h.fault = func(int, bool) error {
				return &nvidia.Error{Op: "query", Code: device.FailureNoDriver, Message: "the driver is not loaded"}
			}
		}},
		"the card is gone": {nil, func(_ *testing.T, w *world, h *hardware) {
			delete(h.cards, "0000:1b:00.0")
			anew(w)
		}},
		"the card fell off the bus": {nil, func(_ *testing.T, w *world, h *hardware) { lost(h); anew(w) }},
		"the only card fell off the bus": {oneGPU, func(_ *testing.T, w *world, h *hardware) {
			lost(h)
			w.snapshot = inventory.Snapshot{Known: true, Reason: "no GPU answers"}
		}},
		"the card fell off the bus of a node that is not ready": {nil, func(_ *testing.T, w *world, h *hardware) {
			lost(h)
			anew(w)
			w.snapshot.Ready, w.snapshot.Reason = false, "the hook cannot run"
		}},
		"another card is there": {nil, func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).UUID = "GPU-new" }},
	} {
		for kind, claim := range map[string]*resourceapi.ResourceClaim{
			"partition": newClaim("c", allocated("r", small0)), "time slices": sliced, "MPS": shareBy(newClaim("c", allocated("r", gpu0)),
				"GpuConfig", byMPS),
			"fraction": part1, "fraction of a partition": migPart1, "plain share": long1,
		} {
			t.Run(name+", "+kind, func(t *testing.T) {
				w := newWorld(t)
				if c.node != nil {
					c.node(w)
				}
				h := withMPS(w)
				p := w.plugin(t)
				mustPrepare(t, p, claim)
				c.gone(t, w, h)
				w.daemons.apart = true
				mustUnprepare(t, p, "uid-c")
				checkClean(t, w)
				if left := w.holders(); len(left) != 0 || len(w.daemons.running) != 0 {
					t.Errorf("left: %q, %v", left, w.daemons.running)
				}
			})
		}
	}
}

// Before the first scan the inventory is empty. Unprepare must not conclude that the card is gone,
// so it must fail and keep the record.
func TestGPUIsNotCalledGoneBeforeFirstScan(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
	w.snapshot = inventory.Snapshot{}
	h.fault = func(int, bool) error {
		return &nvidia.Error{Op: "query", Code: device.FailureLost, Message: "the GPU is lost"}
	}
	p := w.plugin(t)
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, left: %q", err, w.records())
	}
}

// While the GPU does not answer, Unprepare must fail and keep the record, because the MIG instance
// may still exist.
func TestUnprepareFailsWhileGPUDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	h.fault = func(int, bool) error {
		return &nvidia.Error{Op: "query", Code: device.FailureLost, Message: "the GPU is lost"}
	}
	if err := p.Unprepare(t.Context(), "uid-c"); cause.Of(err) != cause.Step || len(w.records()) != 1 {
		t.Errorf("unprepared, with records %q: %v", w.records(), err)
	}
	h.fault = nil
	mustUnprepare(t, p, "uid-c")
	if len(h.of(t, gpu0).Instances) != 0 {
		t.Error("the instance is left")
	}
}

func TestInstanceInUseIsRemovedLater(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).Busy[1] = 2
	err := p.Unprepare(t.Context(), "uid-c")
	if cause.Of(err) != cause.Step || !strings.Contains(err.Error(), "python") || !strings.Contains(err.Error(), small0) {
		t.Fatal(err)
	}
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.State != checkpoint.Reverting || w.specs.of("uid-c") != "" {
		t.Errorf("%s, %v", r.State, err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", small0))); cause.Of(err) != cause.Held ||
		!strings.Contains(err.Error(), "is being unprepared") {
		t.Error(err)
	}
	if err := p.Reconcile(t.Context()); err == nil {
		t.Error("no error was reported")
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	checkClean(t, w)
	mustPrepare(t, p, newClaim("next", allocated("r", small0)))
	mustUnprepare(t, p, "uid-c")
}

// Unprepare removes the partition on gpu1 and fails at the one on gpu0, which is in use. The record
// must not show the removed instance as the driver's own any more.
func TestRemovedInstanceIsNoLongerOwned(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	removed := h.of(t, gpu1).State().MIG.Instances
	h.of(t, gpu0).Busy[1] = 1
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil {
		t.Fatal("the instance was not in use")
	}
	if got, err := p.OwnedInstances(gpu1, removed); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	mustUnprepare(t, p, "uid-c")
}

func TestReadOnlyDiskIsReportedInUnprepareError(t *testing.T) {
	w := newWorld(t)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", gpu0)))
	for n := 1; n <= 3; n++ {
		w.disk.FailAt(n, syscall.EROFS)
		if err := p.Unprepare(t.Context(), "uid-c"); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "uid-c") {
			t.Errorf("write %d: %v", n, err)
		}
	}
	w.disk.Restart()
	mustUnprepare(t, p, "uid-c")
	checkClean(t, w)
}
