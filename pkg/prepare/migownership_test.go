package prepare_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// While the GPU does not answer, Unprepare must fail and keep the record, because the MIG instance
// may still exist.
func TestUnprepareFailsWhileGPUDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	h.fault = func(int, bool) error {
		return &cut.Error{Op: "look", Code: device.FailureLost, Message: "the GPU is lost"}
	}
	if err := p.Unprepare(t.Context(), "uid-c"); cause.Of(err) != cause.Step || len(w.records()) != 1 {
		t.Errorf("unprepared, with records %q: %v", w.records(), err)
	}
	h.fault = nil
	mustUnprepare(t, p, "uid-c")
	if len(h.of(t, gpu0).instances) != 0 {
		t.Error("the instance is left")
	}
}

// The plugin is killed before it creates its MIG instance, and then an admin creates one at the
// same placement. Recover and Reconcile must not remove the admin's instance.
func TestForeignInstanceAtUnfinishedPlaceStays(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.fault = func(call int, after bool) error { return killProcess(w, !after && call == 3) }
	_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
	h.fault = nil
	w.disk.Restart()
	theirs := h.createForeign(t, gpu0, 19, 0)
	w.scan()
	p := w.plugin(t)
	if err := errors.Join(p.Recover(t.Context()), p.Reconcile(t.Context())); err != nil {
		t.Fatal(err)
	}
	checkClean(t, w)
	if in := h.of(t, gpu0).state().MIG.Instances; len(in) != 1 || !steps.SameInstance(in[0], theirs) {
		t.Errorf("want %s, got %s", steps.DescribeInstances(theirs), steps.DescribeInstances(in...))
	}
}

func TestRecoverReadsNoHardware(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	interruptPrepare(t, w, h, 5)
	mustPrepare(t, w.plugin(t), newClaim("d", allocated("a", large4)))
	h.takeCalls()
	p := w.plugin(t)
	if err := p.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if calls := h.takeCalls(); len(calls) > 0 {
		t.Errorf("hardware calls: %q", calls)
	}
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.State != checkpoint.Preparing || w.specs.of("uid-c") != "" {
		t.Errorf("%s, %v", r.State, err)
	}
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkRecordsMatchHardware(t, w, h, p, nil)
	if in := h.of(t, gpu0).instances; len(in) != 1 {
		t.Errorf("instances: %+v", in)
	}
}

// The repair of a missing CDI spec must work whether or not the inventory has the claim's
// partition. If the inventory does not have it, the repair reads the hardware.
func TestMissingSpecOfPartitionIsRestored(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	spec := w.specs.of("uid-c")
	for _, seen := range []bool{false, true} {
		if seen {
			w.scan()
		}
		w.specs.clear()
		h.takeCalls()
		if err := p.RepairAllSpecs(t.Context()); err != nil {
			t.Error(err)
		}
		if w.specs.of("uid-c") != spec || seen == (len(h.takeCalls()) > 0) {
			t.Errorf("%v; the spec is %s", seen, w.specs.of("uid-c"))
		}
	}
	// Now the partition called "neighbor" is lost. The repair must not rewrite the CDI spec, because
	// the device nodes in it may belong to another claim by now.
	h.of(t, gpu1).reset()
	w.scan()
	// The repair must not report the partition lost, because Reconcile recreates it.
	if err := p.RepairAllSpecs(t.Context()); err == nil || len(reconcile.LostDevices(err)) != 0 ||
		!strings.Contains(err.Error(), neighbor+" is gone") || w.specs.of("uid-c") != "" {
		t.Errorf("%v, %s", err, w.specs.of("uid-c"))
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	w.scan()
	checkRecordsMatchHardware(t, w, h, p, nil)
}

// While the plugin recreates a partition, the claim must have no CDI spec, so that no container
// starts with the old devices.
func TestPartitionHasNoSpecWhileItIsRecreated(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).reset()
	h.takeCalls()
	without := 0
	h.fault = func(_ int, after bool) error {
		if w.specs.of("uid-c") == "" {
			without++
		} else if last := h.calls[len(h.calls)-1]; last != "look" {
			t.Errorf("%q (%v) while containers are given %s", last, after, w.specs.of("uid-c"))
		}
		return nil
	}
	mustPrepare(t, p, several)
	if without == 0 || w.specs.of("uid-c") == "" {
		t.Errorf("%d calls without a spec", without)
	}
}

func TestInstanceOwnershipProof(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	ours := h.of(t, gpu0).state().MIG.Instances[0]
	for name, change := range map[string]func(*device.Instance){
		"another ID":      func(in *device.Instance) { in.ID = 7 },
		"another place":   func(in *device.Instance) { in.Placement.Start = 1 },
		"another profile": func(in *device.Instance) { in.ProfileID = 20 },
		"another UUID":    func(in *device.Instance) { in.Compute[0].UUID = "MIG-another" },
	} {
		other := ours
		other.Compute = slices.Clone(ours.Compute)
		change(&other)
		if got, err := p.OwnedInstances(gpu0, []device.Instance{ours, other}); err != nil || len(got) != 1 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	emptied := ours
	emptied.Compute = nil
	if got, err := p.OwnedInstances(gpu0, []device.Instance{emptied}); err != nil || len(got) != 1 {
		t.Errorf("half removed: %v, %v", got, err)
	}
}

// Unprepare removes the partition on gpu1 and fails at the one on gpu0, which is in use. The record
// must not show the removed instance as the driver's own any more.
func TestRemovedInstanceIsNoLongerOwned(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	removed := h.of(t, gpu1).state().MIG.Instances
	h.of(t, gpu0).busy[1] = 1
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil {
		t.Fatal("the instance was not in use")
	}
	if got, err := p.OwnedInstances(gpu1, removed); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	mustUnprepare(t, p, "uid-c")
}
