package prepare_test

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
)

// After a reboot an admin's tool creates MIG instances with the IDs that the driver's instances had
// before. The driver must not treat these as its own.
func TestInstancesAfterRebootAreForeign(t *testing.T) {
	for _, unfinished := range []bool{false, true} {
		w := newWorld(t)
		h := withMIG(w)
		if unfinished {
			h.fault = func(call int, after bool) error { return killProcess(w, after && call == 4) }
			_, _ = w.plugin(t).Prepare(t.Context(), newClaim("c", allocated("a", small0)))
			h.fault = nil
		} else {
			mustPrepare(t, w.plugin(t), newClaim("c", allocated("a", small0)))
		}
		w.reboot()
		h.serial = 0
		theirs := h.createForeign(t, gpu0, 19, 0)
		p := w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.scan()
		if ours, err := p.OwnedInstances(gpu0, []device.Instance{theirs}); err != nil || len(ours) != 0 {
			t.Errorf("foreign instances taken for ours: %v, %v", ours, err)
		}
		if err := p.Reconcile(t.Context()); err != nil {
			t.Error(err)
		}
		mustPrepare(t, p, newClaim("c", allocated("a", small0)))
		mustUnprepare(t, p, "uid-c")
		if len(h.of(t, gpu0).instances) != 1 {
			t.Error("the foreign instance was removed")
		}
	}
}

func TestPartitionIsRecreatedAfterReboot(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	mustPrepare(t, w.plugin(t), several)
	w.reboot()
	p := w.plugin(t)
	if err := errors.Join(p.Recover(t.Context()), p.RepairAllSpecs(t.Context()), p.Reconcile(t.Context())); err != nil {
		t.Fatal(err)
	}
	if w.specs.of(several.UID) != "" {
		t.Errorf("the spec of the last boot was restored: %s", w.specs.of(several.UID))
	}
	mustPrepare(t, p, several)
	checkRecordsMatchHardware(t, w, h, p, nil)
	mustUnprepare(t, p, several.UID)
	checkClean(t, w)
}

func TestRePrepareOfPartitionsWritesNothing(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	w.scan()
	h.takeCalls()
	before, _ := w.disk.ReadFile(recordFile(t, w, "uid-c"))
	w.disk.FailAt(1<<30, nil)
	mustPrepare(t, p, several)
	// The repair makes three writes: the two CDI specs, which the real store would only compare, and
	// the sync of the directory.
	if n := w.disk.Writes(); n != 3 {
		t.Errorf("%d writes", n)
	}
	if after, _ := w.disk.ReadFile(recordFile(t, w, "uid-c")); string(after) != string(before) {
		t.Error("the record was written")
	}
	if calls := h.takeCalls(); !slices.Equal(calls, []string{"look", "look"}) {
		t.Errorf("hardware calls: %q", calls)
	}
}

func TestReplacedInstanceIsNeverGivenToAClaim(t *testing.T) {
	for name, call := range map[string]func(*testing.T, *plugin) error{
		"prepare":   func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err },
		"reconcile": func(t *testing.T, p *plugin) error { return p.Reconcile(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, several)
			h.of(t, gpu0).reset()
			theirs := h.createForeign(t, gpu0, 19, 0)
			w.scan()
			h.takeCalls()
			err := call(t, p)
			if calls := h.takeCalls(); slices.ContainsFunc(calls, func(c string) bool { return strings.HasPrefix(c, "create") }) {
				t.Errorf("impossible hardware calls: %q", calls)
			}
			lost := reconcile.LostDevices(err)
			if len(lost) != 1 || lost[0].Device != small0 || lost[0].Claim != "default/c" || !strings.Contains(err.Error(), theirs.Compute[0].UUID) {
				t.Errorf("%v", err)
			}
			if spec := w.specs.of("uid-c"); spec != "" {
				t.Errorf("a restarted container gets %s", spec)
			}
			if err := p.RepairAllSpecs(t.Context()); err == nil || w.specs.of("uid-c") != "" {
				t.Errorf("the spec was restored: %v", err)
			}
			mustUnprepare(t, p, "uid-c")
			checkClean(t, w)
			if in := h.of(t, gpu0).instances; len(in) != 1 || in[theirs.ID].Compute[0].UUID != theirs.Compute[0].UUID {
				t.Errorf("a foreign instance was changed: %+v", in)
			}
			if in := h.of(t, gpu1).instances; len(in) != 0 {
				t.Errorf("left: %+v", in)
			}
		})
	}
}

func TestInstanceInUseIsRemovedLater(t *testing.T) {
	w := newWorld(t)
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, several)
	h.of(t, gpu0).busy[1] = 2
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

// While Prepare runs, after its read of the GPU, an admin creates an instance at the same
// placement. The driver must not treat it as its own.
func TestPlaceTakenDuringPrepareStaysForeign(t *testing.T) {
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
	if cause.Of(err) != cause.Device || !strings.Contains(err.Error(), "GPU instance 1") {
		t.Error(err)
	}
	checkClean(t, w)
	if len(h.of(t, gpu0).instances) != 1 {
		t.Error("the foreign instance was removed")
	}
}

func TestInstanceWithoutRecordIsForeign(t *testing.T) {
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
	if ours, err := p.OwnedInstances(gpu0, in); err != nil || len(ours) != 1 {
		t.Errorf("the instance of a prepared claim is foreign: %v, %v", ours, err)
	}
	if _, err := p.Prepare(t.Context(), newClaim("next", allocated("r", gpu0))); cause.Of(err) != cause.Held {
		t.Error(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	if err := p.Unprepare(klog.NewContext(t.Context(), logger), "uid-c"); err != nil {
		t.Fatal(err)
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for _, want := range []string{"Kept the MIG instances", small0, "-dgi", "adopt"} {
		if !strings.Contains(said, want) {
			t.Errorf("the log does not name %q: %s", want, said)
		}
	}
	all, theirs, err := p.ForeignInstances(t.Context(), h.card(t, gpu0), gpu0)
	if err != nil || len(all) != 1 || len(theirs) != 1 {
		t.Errorf("%v, %v, %v", all, theirs, err)
	}
	if kept := w.disk.Names(filepath.Join(state, "quarantine")); len(kept) != 1 {
		t.Errorf("the quarantine has %q", kept)
	}
}

func TestUnprepareNeedsNeitherDriverNorGPU(t *testing.T) {
	oneGPU := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[:1] }
	anew := func(w *world) { w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:] }
	lost := func(h *hardware) {
		h.fault = func(int, bool) error {
			return &cut.Error{Op: "look", Code: device.FailureLost, Message: "the GPU is lost"}
		}
	}
	for name, c := range map[string]struct {
		node func(*world)
		gone func(*testing.T, *world, *hardware)
	}{
		"the driver is not loaded": {nil, func(_ *testing.T, w *world, h *hardware) {
			w.snapshot.Ready = false
			h.fault = func(int, bool) error {
				return &cut.Error{Op: "look", Code: device.FailureNoDriver, Message: "the driver is not loaded"}
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
		"another card is there": {nil, func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).uuid = "GPU-new" }},
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
		return &cut.Error{Op: "look", Code: device.FailureLost, Message: "the GPU is lost"}
	}
	p := w.plugin(t)
	if err := p.Unprepare(t.Context(), "uid-c"); err == nil || len(w.records()) != 1 {
		t.Errorf("%v, left: %q", err, w.records())
	}
}
