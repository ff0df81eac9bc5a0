package prepare

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// An admin's tool makes its layout at every boot, with the IDs that ours had.
func TestAfterARebootWhatIsThereIsSomeoneElses(t *testing.T) {
	for _, unfinished := range []bool{false, true} {
		w := newWorld(t)
		h := withMIG(w)
		if unfinished {
			h.fault = func(call int, after bool) error { return dies(w, after && call == 4) }
			_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
			h.fault = nil
		} else {
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("a", small0)))
		}
		w.reboot()
		h.serial = 0
		theirs := h.someoneElse(t, gpu0, 19, 0)
		p := w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.scan()
		if ours, err := p.Explained(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
			t.Errorf("taken for ours: %v, %v", ours, err)
		}
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		mustPrepare(t, p, newClaim("c", allocated("a", small0)))
		mustUnprepare(t, p, "uid-c")
		if len(h.of(t, gpu0).instances) != 1 {
			t.Error("it was removed")
		}
	}
}

func TestAfterARebootAPartitionIsCutAgainAtItsPlace(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), several)
	w.reboot()
	p := w.plugin(t)
	if err := errors.Join(p.Recover(t.Context()), p.Mend(t.Context()), p.Reconcile(t.Context())); err != nil {
		t.Fatal(err)
	}
	if w.specs.of(several.UID) != "" {
		t.Errorf("a spec of the last boot came back: %s", w.specs.of(several.UID))
	}
	mustPrepare(t, p, several)
	agree(t, w, h, p, nil)
	mustUnprepare(t, p, several.UID)
	clean(t, w)
}

func TestARepeatedPrepareOfPartitionsWritesNothing(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	w.scan()
	h.asked()
	before, _ := w.disk.ReadFile(recordFile(t, w, "uid-c"))
	w.disk.FailAt(1<<30, nil)
	mustPrepare(t, p, several)
	// The two specs, which the real store compares with what is there, and the directory whose names the disk is made sure to have.
	if n := w.disk.Writes(); n != 3 {
		t.Errorf("%d writes", n)
	}
	if after, _ := w.disk.ReadFile(recordFile(t, w, "uid-c")); string(after) != string(before) {
		t.Error("the record was written")
	}
	if calls := h.asked(); !slices.Equal(calls, []string{"look", "look"}) {
		t.Errorf("asked %q", calls)
	}
}

func TestAnotherInstanceAtAClaimsPlaceIsNeverGivenToIt(t *testing.T) {
	for name, call := range map[string]func(*testing.T, *Preparer) error{
		"prepare":   func(t *testing.T, p *Preparer) error { _, err := p.Prepare(t.Context(), several); return err },
		"reconcile": func(t *testing.T, p *Preparer) error { return p.Reconcile(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).reset()
			theirs := h.someoneElse(t, gpu0, 19, 0)
			w.scan()
			h.asked()
			err := call(t, p)
			if calls := h.asked(); slices.ContainsFunc(calls, func(c string) bool { return strings.HasPrefix(c, "create") }) {
				t.Errorf("the hardware was asked for what cannot be: %q", calls)
			}
			lost := Lost(err)
			if len(lost) != 1 || lost[0].Device != small0 || lost[0].Claim != "default/c" || !strings.Contains(err.Error(), theirs.Compute[0].UUID) {
				t.Errorf("%v", err)
			}
			if spec := w.specs.of("uid-c"); spec != "" {
				t.Errorf("a container that restarts gets %s", spec)
			}
			if err := p.Mend(t.Context()); err == nil || w.specs.of("uid-c") != "" {
				t.Errorf("the spec came back: %v", err)
			}
			mustUnprepare(t, p, "uid-c")
			clean(t, w)
			if in := h.of(t, gpu0).instances; len(in) != 1 || in[theirs.ID].Compute[0].UUID != theirs.Compute[0].UUID {
				t.Errorf("someone else's is touched: %+v", in)
			}
			if in := h.of(t, gpu1).instances; len(in) != 0 {
				t.Errorf("left: %+v", in)
			}
		})
	}
}

func TestAnInstanceInUseIsAnErrorAndRemovedLater(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).busy[1] = 2
	err := p.Unprepare(t.Context(), "uid-c")
	if CauseOf(err) != CauseStep || !strings.Contains(err.Error(), "python") || !strings.Contains(err.Error(), small0) {
		t.Fatal(err)
	}
	if r, _, err := p.Records.Load("uid-c"); err != nil || r.State != checkpoint.Reverting || w.specs.of("uid-c") != "" {
		t.Errorf("%s, %v", r.State, err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", small0))); CauseOf(err) != CauseHeld || !strings.Contains(err.Error(), "being given back") {
		t.Error(err)
	}
	if err := p.Reconcile(t.Context()); err == nil {
		t.Error("nobody was told")
	}
	if err := p.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	clean(t, w)
	mustPrepare(t, p, newClaim("next", allocated("r", small0)))
	mustUnprepare(t, p, "uid-c")
}

// Between the look and the making someone else may take the place.
func TestAPlaceThatSomeoneElseTakesMeanwhileIsTheirs(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	h.of(t, gpu0).on = true
	w.scan()
	p := w.plugin(t)
	h.fault = func(call int, after bool) error {
		if s := h.of(t, gpu0); call == 1 && after {
			s.instances[1] = device.Instance{ID: 1, ProfileID: 19, Placement: device.Placement{Start: 0, Size: 1}}
		}
		return nil
	}
	_, err := p.Prepare(t.Context(), newClaim("c", allocated("r", small0)))
	if CauseOf(err) != CauseDevice || !strings.Contains(err.Error(), "GPU instance 1") {
		t.Error(err)
	}
	clean(t, w)
	if len(h.of(t, gpu0).instances) != 1 {
		t.Error("someone else's was removed")
	}
}

func TestWithTheRecordTheProofIsGone(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", small0)))
	in := h.of(t, gpu0).state().MIG.Instances
	w.disk.Put(recordFile(t, w, "uid-c"), []byte("{"))
	w.scan()
	if err := errors.Join(p.Recover(t.Context()), p.Reconcile(t.Context())); err != nil {
		t.Error(err)
	}
	if ours, err := p.Explained(gpu0, in); err != nil || len(ours) != 1 {
		t.Errorf("while its claim is held it is not an admin's: %v, %v", ours, err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); CauseOf(err) != CauseHeld {
		t.Error(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	if err := p.Unprepare(klog.NewContext(t.Context(), logger), "uid-c"); err != nil {
		t.Fatal(err)
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for _, want := range []string{"stay on the node", small0, "-dgi", "adopt"} {
		if !strings.Contains(said, want) {
			t.Errorf("of what stays the log does not say %q: %s", want, said)
		}
	}
	all, theirs, err := p.Foreign(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 1 || len(theirs) != 1 {
		t.Errorf("%v, %v, %v", all, theirs, err)
	}
	if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 1 {
		t.Errorf("the quarantine holds %q", kept)
	}
}

func TestGivingBackNeedsNoDriverAndNoCard(t *testing.T) {
	oneGPU := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[:1] }
	anew := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:] }
	lost := func(h *hardware) {
		h.fault = func(int, bool) error {
			return &nvidia.CutError{Op: "look", Code: nvidia.CodeLost, Message: "the GPU is lost"}
		}
	}
	for name, c := range map[string]struct {
		node func(*world)
		gone func(*testing.T, *world, *hardware)
	}{
		"the driver is not loaded": {nil, func(_ *testing.T, w *world, h *hardware) {
			w.snapshot.Ready = false
			h.fault = func(int, bool) error {
				return &nvidia.CutError{Op: "look", Code: nvidia.CodeNoDriver, Message: "the driver is not loaded"}
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
		"the card fell off the bus of a node that may offer none": {nil, func(_ *testing.T, w *world, h *hardware) {
			lost(h)
			anew(w)
			w.snapshot.Ready, w.snapshot.Reason = false, "the hook cannot run"
		}},
		"another card is there": {nil, func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).uuid = "GPU-new" }},
	} {
		for kind, claim := range map[string]*resourceapi.ResourceClaim{
			"partition": newClaim("c", allocated("r", small0)), "time slices": sliced, "MPS": shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", byMPS),
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
				clean(t, w)
				if left := w.holders(); len(left) != 0 || len(w.daemons.running) != 0 {
					t.Errorf("left: %q, %v", left, w.daemons.running)
				}
			})
		}
	}
}

// What nobody has looked at yet may be there.
func TestACardIsNotCalledGoneBeforeTheNodeWasLookedAt(t *testing.T) {
	w := newWorld(t)
	h := withMPS(w)
	mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", small0)))
	w.snapshot = inventory.Snapshot{}
	h.fault = func(int, bool) error {
		return &nvidia.CutError{Op: "look", Code: nvidia.CodeLost, Message: "the GPU is lost"}
	}
	p := w.plugin(t)
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, left: %q", err, w.records())
	}
}
