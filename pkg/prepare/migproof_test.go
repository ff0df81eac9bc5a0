package prepare

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// A GPU that does not answer and is still in the node may have its instances when it answers again.
func TestOfACardThatIsStillThereNothingIsForgotten(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	h.fault = func(int, bool) error {
		return &nvidia.CutError{Op: "look", Code: nvidia.CodeLost, Message: "the GPU is lost"}
	}
	if err := p.Unprepare(t.Context(), "uid-c"); CauseOf(err) != CauseStep || len(w.records()) != 1 {
		t.Errorf("given back, with %q: %v", w.records(), err)
	}
	h.fault = nil
	mustUnprepare(t, p, "uid-c")
	if len(h.of(t, gpu0).instances) != 0 {
		t.Error("it is left")
	}
}

// Ours was not made yet when the process was killed, and before the next one someone makes theirs at the same place.
func TestWhatAppearsAtThePlaceOfAnUnfinishedClaimStays(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.fault = func(call int, after bool) error { return dies(w, !after && call == 3) }
	_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
	h.fault = nil
	w.disk.Restart()
	theirs := h.someoneElse(t, gpu0, 19, 0)
	w.scan()
	p := w.plugin(t)
	if err := errors.Join(p.Recover(t.Context()), p.Reconcile(t.Context())); err != nil {
		t.Fatal(err)
	}
	clean(t, w)
	if in := h.of(t, gpu0).state().MIG.Instances; len(in) != 1 || !matches(in[0], theirs) {
		t.Errorf("of %s there is %s", describe(theirs), describe(in...))
	}
}

func TestTheStartWaitsForNoHardware(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	left(t, w, h, 5)
	mustPrepare(t, w.plugin(t), newClaim("d", allocated("a", large4)))
	h.asked()
	p := w.plugin(t)
	if err := p.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if calls := h.asked(); len(calls) > 0 {
		t.Errorf("asked %q", calls)
	}
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.State != checkpoint.Preparing || w.specs.of("uid-c") != "" {
		t.Errorf("%s, %v", r.State, err)
	}
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	agree(t, w, h, p, nil)
	if in := h.of(t, gpu0).instances; len(in) != 1 {
		t.Errorf("there is %+v", in)
	}
}

// Until the inventory has seen a new partition, its spec is mended by a look at the hardware.
func TestALostSpecOfAPartitionComesBack(t *testing.T) {
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
		h.asked()
		if err := p.Mend(t.Context()); err != nil {
			t.Error(err)
		}
		if w.specs.of("uid-c") != spec || seen == (len(h.asked()) > 0) {
			t.Errorf("seen: %v; the spec is %s", seen, w.specs.of("uid-c"))
		}
	}
	// One that is gone is not written again: what its nodes open may be another claim's.
	h.of(t, gpu1).reset()
	w.scan()
	// It is not lost: whoever reconciles makes it again.
	if err := p.Mend(t.Context()); err == nil || len(Lost(err)) != 0 || !strings.Contains(err.Error(), beside+" is gone") || w.specs.of("uid-c") != "" {
		t.Errorf("%v, %s", err, w.specs.of("uid-c"))
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	w.scan()
	agree(t, w, h, p, nil)
}

// While it is made again nobody may start a container with what was there before.
func TestAPartitionThatIsBeingMadeAgainHasNoSpec(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).reset()
	h.asked()
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

func TestWhatProvesThatAnInstanceIsOurs(t *testing.T) {
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
		if got, err := p.Explained(gpu0, []device.Instance{ours, other}); err != nil || len(got) != 1 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	emptied := ours
	emptied.Compute = nil
	if got, err := p.Explained(gpu0, []device.Instance{emptied}); err != nil || len(got) != 1 {
		t.Errorf("half of it is gone: %v, %v", got, err)
	}
}

// An instance that is gone is no proof any more, also while another of the claim stays.
func TestWhatIsRemovedIsNotOursAnyMore(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	removed := h.of(t, gpu1).state().MIG.Instances
	h.of(t, gpu0).busy[1] = 1
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil {
		t.Fatal("it was not in use")
	}
	if got, err := p.Explained(gpu1, removed); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	mustUnprepare(t, p, "uid-c")
}

func TestWhatWasThereBeforeIsNotTakenForWhatWasMade(t *testing.T) {
	in := device.Instance{ID: 3, ProfileID: 19, Placement: device.Placement{Start: 2, Size: 1}}
	s := &migInstance{ProfileID: 19, Placement: in.Placement, Asked: true}
	if !s.explains(in) {
		t.Error("what was asked for is there, and not taken for it")
	}
	s.Before = []occupied{{4, in.Placement}, {3, device.Placement{Start: 0, Size: 1}}}
	if !s.explains(in) {
		t.Error("an ID is used again")
	}
	s.Before = append(s.Before, occupied{3, in.Placement})
	if s.explains(in) {
		t.Error("it was there before")
	}
}
