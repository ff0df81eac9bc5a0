package prepare

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// faults are the ways in which a call of the hardware's goes wrong, once.
var faults = map[string]func(w *world, after bool) error{
	"an error": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &nvidia.CutError{Op: "a call", Code: nvidia.CodeOther, Message: "unknown error"}
	},
	"a refusal": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &nvidia.CutError{Op: "a call", Code: nvidia.CodeInUse, Message: "in use by another client"}
	},
	"a lost answer": func(_ *world, after bool) error {
		if !after {
			return nil
		}
		return &nvidia.CutError{Op: "a call", Code: nvidia.CodeDied, Message: "the worker was killed"}
	},
	"a call without an end": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &nvidia.CutError{Op: "a call", Code: nvidia.CodeTimeout, Message: "no answer"}
	},
	"kill -9 before": func(w *world, after bool) error { return dies(w, !after) },
	"kill -9 after":  func(w *world, after bool) error { return dies(w, after) },
}

func dies(w *world, now bool) error {
	if !now {
		return nil
	}
	w.disk.StopAt(1)
	_ = w.disk.Write()
	return durabletest.ErrStopped
}

// scene is a node with a call that will be disturbed.
type scene struct {
	name string
	// prepare makes the node as it is before.
	before func(*testing.T, *world, *hardware, *Preparer)
	call   func(*testing.T, *Preparer) error
}

var several = newClaim("c", allocated("a", small0), allocated("b", beside))

var scenes = []scene{
	{"prepare", func(t *testing.T, w *world, h *hardware, _ *Preparer) {
		h.someoneElse(t, gpu1, 9, 0) // gpu0's mode is off, gpu1's is on
	}, func(t *testing.T, p *Preparer) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"unprepare", func(t *testing.T, w *world, h *hardware, p *Preparer) {
		h.someoneElse(t, gpu1, 9, 0)
		mustPrepare(t, p, several)
	}, func(t *testing.T, p *Preparer) error { return p.Unprepare(t.Context(), several.UID) }},
	{"prepare again after a reset", func(t *testing.T, w *world, h *hardware, p *Preparer) {
		mustPrepare(t, p, several)
		h.of(t, gpu0).reset()
		h.of(t, gpu0).on = false
		h.someoneElse(t, gpu1, 9, 0)
	}, func(t *testing.T, p *Preparer) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"reconcile after a reset", func(t *testing.T, w *world, h *hardware, p *Preparer) {
		mustPrepare(t, p, several)
		h.of(t, gpu1).reset()
		h.someoneElse(t, gpu1, 9, 0)
		w.scan()
	}, func(t *testing.T, p *Preparer) error { return p.Reconcile(t.Context()) }},
	{"another allocation", func(t *testing.T, w *world, h *hardware, p *Preparer) {
		h.someoneElse(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("c", allocated("a", large0)))
	}, func(t *testing.T, p *Preparer) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"prepare the whole of what was cut", func(t *testing.T, w *world, h *hardware, p *Preparer) {
		h.someoneElse(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("before", allocated("a", small0)))
		mustUnprepare(t, p, "uid-before")
	}, func(t *testing.T, p *Preparer) error {
		_, err := p.Prepare(t.Context(), newClaim("c", allocated("a", gpu0)))
		return err
	}},
}

// left is a claim whose preparation was killed after so many calls of the hardware's.
func left(t *testing.T, w *world, h *hardware, calls int) {
	t.Helper()
	h.asked()
	h.fault = func(call int, after bool) error { return dies(w, after && call == calls) }
	if _, err := w.plugin(t).Prepare(t.Context(), several); !w.disk.Stopped() {
		t.Fatalf("it was not killed: %v", err)
	}
	h.fault = nil
	w.disk.Restart()
}

// agree is what must hold after every start: hardware, records and specs say the same, and nothing of anyone else was touched.
func agree(t *testing.T, w *world, h *hardware, p *Preparer, theirs []device.Instance) {
	t.Helper()
	explained := map[string]int{}
	for _, name := range w.records() {
		uid, _, _ := strings.Cut(name, "_")
		if strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".json") {
			t.Errorf("%s is left over", name)
			continue
		}
		r, _, err := p.Records.Load(types.UID(uid))
		if err != nil || r.State != checkpoint.Prepared {
			t.Errorf("claim %s is %s: %v", uid, r.State, err)
			continue
		}
		if r.BootID != w.bootID {
			continue
		}
		spec := w.specs.of(r.ClaimUID)
		if spec == "" {
			t.Errorf("claim %s has no spec", uid)
		}
		steps, err := restore(r.Steps)
		if err != nil {
			t.Error(err)
		}
		for _, step := range steps {
			s, ok := step.(*migInstance)
			if !ok {
				continue
			}
			there, ok := h.of(t, s.GPU).instances[s.Instance.ID]
			if !ok || len(there.Compute) != 1 || there.Compute[0] != s.Instance.Compute[0] || there.Placement != s.Placement {
				t.Errorf("claim %s has %+v, and there is %+v", uid, s.Instance, there)
			}
			if !strings.Contains(spec, fmt.Sprintf("nvidia-cap%d\"", s.Instance.Compute[0].Minor)) {
				t.Errorf("the spec does not name the instance's node: %s", spec)
			}
			explained[s.GPU]++
		}
	}
	if specs, _ := w.specs.Claims(); len(specs) > len(w.records()) {
		t.Errorf("specs %q of records %q", specs, w.records())
	}
	var stayed []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).state().MIG.Instances
		ours, err := p.Explained(gpu, there)
		if err != nil || len(ours) != explained[gpu] {
			t.Errorf("%s: %d instances are explained, by %d claims' partitions: %v", gpu, len(ours), explained[gpu], err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return o.ID == in.ID }) {
				stayed = append(stayed, in)
			}
		}
	}
	if !slices.EqualFunc(stayed, theirs, func(a, b device.Instance) bool { return matches(a, b) && len(a.Compute) == len(b.Compute) }) {
		t.Errorf("of others there were %s, and are %s", describe(theirs...), describe(stayed...))
	}
}

// foreign are the instances that the scene made past the plugin.
func foreign(t *testing.T, h *hardware, p *Preparer) []device.Instance {
	t.Helper()
	var theirs []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).state().MIG.Instances
		ours, err := p.Explained(gpu, there)
		if err != nil {
			t.Fatal(err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return matches(o, in) }) {
				theirs = append(theirs, in)
			}
		}
	}
	return theirs
}

// afterwards is the next process: it puts the node in order, and everything works.
func afterwards(t *testing.T, w *world, h *hardware, theirs []device.Instance) {
	t.Helper()
	h.fault = nil
	p := w.plugin(t)
	if err := p.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	agree(t, w, h, p, theirs)
	h.asked()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, call := range h.asked() {
		if call != "look" {
			t.Errorf("there was something left to do: %q", call)
		}
	}
	mustPrepare(t, p, several)
	w.scan()
	agree(t, w, h, p, theirs)
	mustUnprepare(t, p, several.UID)
	clean(t, w)
	w.scan()
	mustPrepare(t, p, newClaim("whole", allocated("r", gpu0)))
	agree(t, w, h, p, theirs)
}

func TestWhereverACallOfTheHardwareGoesWrongNothingIsLeftAndNothingForeignIsTouched(t *testing.T) {
	for _, s := range scenes {
		for name, fault := range faults {
			for n := 1; ; n++ {
				w := newWorld(t)
				h := withMIG(w)
				p := w.plugin(t)
				s.before(t, w, h, p)
				w.scan()
				theirs := foreign(t, h, p)
				h.asked()
				reached := false
				h.fault = func(call int, after bool) error {
					if call != n {
						return nil
					}
					reached = true
					return fault(w, after)
				}
				err := s.call(t, p)
				if !reached {
					if err != nil || n == 1 {
						t.Fatalf("%s, %s: %d calls: %v", s.name, name, n-1, err)
					}
					break
				}
				t.Run(fmt.Sprintf("%s, %s at call %d", s.name, name, n), func(t *testing.T) {
					w.disk.Restart()
					afterwards(t, w, h, theirs)
				})
			}
		}
	}
}

func TestWhereverTheProcessEndsAtAWriteNothingIsLeftAndNothingForeignIsTouched(t *testing.T) {
	for _, s := range scenes {
		for name, end := range ends {
			for n := 1; ; n++ {
				w := newWorld(t)
				h := withMIG(w)
				p := w.plugin(t)
				s.before(t, w, h, p)
				w.scan()
				theirs := foreign(t, h, p)
				w.disk.StopAt(n)
				err := s.call(t, p)
				if !w.disk.Stopped() {
					if err != nil || n < 6 {
						t.Fatalf("%s, %s: %d writes: %v", s.name, name, n, err)
					}
					break
				}
				t.Run(fmt.Sprintf("%s, %s at write %d", s.name, name, n), func(t *testing.T) {
					end(w)
					if name == "power cut" {
						theirs = nil
					}
					afterwards(t, w, h, theirs)
				})
			}
		}
	}
}

func TestADiskThatFailsOnceLeavesNothing(t *testing.T) {
	for _, s := range scenes {
		for n := 1; ; n++ {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			s.before(t, w, h, p)
			w.scan()
			theirs := foreign(t, h, p)
			w.disk.FailAt(n, errors.New("no space left"))
			_ = s.call(t, p)
			if w.disk.Writes() < n {
				break
			}
			t.Run(fmt.Sprintf("%s, write %d", s.name, n), func(t *testing.T) {
				w.disk.Restart()
				afterwards(t, w, h, theirs)
			})
		}
	}
}

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
	if n := w.disk.Writes(); n != 2 { // the two specs, which the real store compares with what is there
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
	for name, gone := range map[string]func(*testing.T, *world, *hardware){
		"the driver is not loaded": func(_ *testing.T, w *world, h *hardware) {
			w.snapshot.Ready = false
			h.fault = func(int, bool) error {
				return &nvidia.CutError{Op: "look", Code: nvidia.CodeNoDriver, Message: "the driver is not loaded"}
			}
		},
		"the card is gone": func(_ *testing.T, w *world, h *hardware) {
			delete(h.cards, "0000:1b:00.0")
			w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:]
		},
		"the card fell off the bus": func(_ *testing.T, w *world, h *hardware) {
			h.fault = func(int, bool) error {
				return &nvidia.CutError{Op: "look", Code: nvidia.CodeLost, Message: "the GPU is lost"}
			}
			w.snapshot.Node.GPUs = w.snapshot.Node.GPUs[1:]
		},
		"another card is there": func(t *testing.T, _ *world, h *hardware) { h.of(t, gpu0).uuid = "GPU-new" },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			mustPrepare(t, p, newClaim("c", allocated("r", small0)))
			gone(t, w, h)
			mustUnprepare(t, p, "uid-c")
			clean(t, w)
		})
	}
}

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
	if lost := Lost(p.Mend(t.Context())); len(lost) != 1 || lost[0].Device != beside || w.specs.of("uid-c") != "" {
		t.Errorf("%v, %s", lost, w.specs.of("uid-c"))
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
