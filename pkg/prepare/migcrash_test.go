package prepare_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// stride is the distance between the hardware calls or disk writes that the tests let fail, one per
// run. With go test -short it is larger, because the race detector makes these tests many times
// slower.
func stride() int {
	if testing.Short() {
		return 7
	}
	return 1
}

// faults has the ways in which a hardware call can fail, by name. Each function is called before
// and after the effect of the call and returns the error that the call then returns.
var faults = map[string]func(w *world, after bool) error{
	"an error": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &cut.Error{Op: "a call", Code: device.FailureOther, Message: "unknown error"}
	},
	"a refusal": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &cut.Error{Op: "a call", Code: device.FailureInUse, Message: "in use by another client"}
	},
	"a lost answer": func(_ *world, after bool) error {
		if !after {
			return nil
		}
		return &cut.Error{Op: "a call", Code: device.FailureDied, Message: "the worker was killed"}
	},
	"a hung call": func(_ *world, after bool) error {
		if after {
			return nil
		}
		return &cut.Error{Op: "a call", Code: device.FailureTimeout, Message: "no answer"}
	},
	"kill -9 before": func(w *world, after bool) error { return killProcess(w, !after) },
	"kill -9 after":  func(w *world, after bool) error { return killProcess(w, after) },
}

func killProcess(w *world, now bool) error {
	if !now {
		return nil
	}
	w.disk.StopAt(1)
	_ = w.disk.Write()
	return durabletest.ErrStopped
}

// scene describes a fake node and a call on it. The tests let the call fail at every possible
// point.
type scene struct {
	name string
	// before sets up the fake node for the call.
	before func(*testing.T, *world, *hardware, *plugin)
	call   func(*testing.T, *plugin) error
}

var several = newClaim("c", allocated("a", small0), allocated("b", neighbor))

var scenes = []scene{
	{"prepare", func(t *testing.T, w *world, h *hardware, _ *plugin) {
		h.createForeign(t, gpu1, 9, 0) // gpu0's mode is off, gpu1's is on
	}, func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"unprepare", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, several)
	}, func(t *testing.T, p *plugin) error { return p.Unprepare(t.Context(), several.UID) }},
	{"prepare again after a reset", func(t *testing.T, w *world, h *hardware, p *plugin) {
		mustPrepare(t, p, several)
		h.of(t, gpu0).reset()
		h.of(t, gpu0).on = false
		h.createForeign(t, gpu1, 9, 0)
	}, func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"reconcile after a reset", func(t *testing.T, w *world, h *hardware, p *plugin) {
		mustPrepare(t, p, several)
		h.of(t, gpu1).reset()
		h.createForeign(t, gpu1, 9, 0)
		w.scan()
	}, func(t *testing.T, p *plugin) error { return p.Reconcile(t.Context()) }},
	{"another allocation", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("c", allocated("a", large0)))
	}, func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"prepare the whole GPU after partitions", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("before", allocated("a", small0)))
		mustUnprepare(t, p, "uid-before")
	}, func(t *testing.T, p *plugin) error {
		_, err := p.Prepare(t.Context(), newClaim("c", allocated("a", gpu0)))
		return err
	}},
}

// interruptPrepare prepares the claim called "several", and kills the plugin after this many
// hardware calls.
func interruptPrepare(t *testing.T, w *world, h *hardware, calls int) {
	t.Helper()
	h.takeCalls()
	h.fault = func(call int, after bool) error { return killProcess(w, after && call == calls) }
	if _, err := w.plugin(t).Prepare(t.Context(), several); !w.disk.Stopped() {
		t.Fatalf("the process was not killed: %v", err)
	}
	h.fault = nil
	w.disk.Restart()
}

// checkRecordsMatchHardware fails the test unless the claims' records, the CDI specs and the MIG
// instances agree. The instances in "theirs", which an admin created, must be unchanged.
func checkRecordsMatchHardware(t *testing.T, w *world, h *hardware, p *plugin, theirs []device.Instance) {
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
		list, err := steps.Decode(r.Steps)
		if err != nil {
			t.Error(err)
		}
		for _, step := range list {
			s, ok := step.(*steps.MIGInstance)
			if !ok {
				continue
			}
			there, ok := h.of(t, s.GPU).instances[s.Instance.ID]
			if !ok || len(there.Compute) != 1 || there.Compute[0] != s.Instance.Compute[0] || there.Placement != s.Placement {
				t.Errorf("claim %s has %+v, but the GPU has %+v", uid, s.Instance, there)
			}
			if !strings.Contains(spec, fmt.Sprintf("nvidia-cap%d\"", s.Instance.Compute[0].Minor)) {
				t.Errorf("the spec does not name the instance's node: %s", spec)
			}
			explained[s.GPU]++
		}
	}
	for _, file := range w.holders() {
		if held, _, err := p.Records.Holder(strings.TrimSuffix(file, ".json")); err == nil && held.BootID == w.bootID &&
			held.Step.Kind == steps.MIGInstanceKind {
			explained[held.GPUs[0]]++
		}
	}
	if specs, _ := w.specs.Claims(); len(specs) > len(w.records()) {
		t.Errorf("specs %q, records %q", specs, w.records())
	}
	var stayed []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).state().MIG.Instances
		ours, err := p.OwnedInstances(gpu, there)
		if err != nil || len(ours) != explained[gpu] {
			t.Errorf("%s: %d instances are explained, by %d claims' partitions: %v", gpu, len(ours), explained[gpu], err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return o.ID == in.ID }) {
				stayed = append(stayed, in)
			}
		}
	}
	same := func(a, b device.Instance) bool { return steps.SameInstance(a, b) && len(a.Compute) == len(b.Compute) }
	if !slices.EqualFunc(stayed, theirs, same) {
		t.Errorf("foreign instances were %s and are %s", steps.DescribeInstances(theirs...), steps.DescribeInstances(stayed...))
	}
}

// createForeignInstances returns the MIG instances on the node that no claim's record explains, so
// those of an admin.
func createForeignInstances(t *testing.T, h *hardware, p *plugin) []device.Instance {
	t.Helper()
	var theirs []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).state().MIG.Instances
		ours, err := p.OwnedInstances(gpu, there)
		if err != nil {
			t.Fatal(err)
		}
		for _, in := range there {
			if !slices.ContainsFunc(ours, func(o device.Instance) bool { return steps.SameInstance(o, in) }) {
				theirs = append(theirs, in)
			}
		}
	}
	return theirs
}

// checkAfterRecovery starts a new plugin process. It fails the test unless Recover and Reconcile
// repair the node and claims can be prepared again. The instances in "theirs" are the admin's.
func checkAfterRecovery(t *testing.T, w *world, h *hardware, theirs []device.Instance) {
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
	checkRecordsMatchHardware(t, w, h, p, theirs)
	h.takeCalls()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, call := range h.takeCalls() {
		if call != "look" {
			t.Errorf("work was left to do: %q", call)
		}
	}
	mustPrepare(t, p, several)
	w.scan()
	checkRecordsMatchHardware(t, w, h, p, theirs)
	mustUnprepare(t, p, several.UID)
	checkClean(t, w)
	w.scan()
	mustPrepare(t, p, newClaim("whole", allocated("r", gpu0)))
	checkRecordsMatchHardware(t, w, h, p, theirs)
}

func TestFailedHardwareCallsLeaveNothingBehind(t *testing.T) {
	for _, s := range scenes {
		for name, fault := range faults {
			for n := 1; ; n += stride() {
				w := newWorld(t)
				h := withMIG(w)
				p := w.plugin(t)
				s.before(t, w, h, p)
				w.scan()
				theirs := createForeignInstances(t, h, p)
				h.takeCalls()
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
					checkAfterRecovery(t, w, h, theirs)
				})
			}
		}
	}
}

func TestProcessKilledAtAnyWriteLeavesNothingBehind(t *testing.T) {
	for _, s := range scenes {
		for name, end := range deaths {
			for n := 1; ; n += stride() {
				w := newWorld(t)
				h := withMIG(w)
				p := w.plugin(t)
				s.before(t, w, h, p)
				w.scan()
				theirs := createForeignInstances(t, h, p)
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
					checkAfterRecovery(t, w, h, theirs)
				})
			}
		}
	}
}

func TestOneDiskFailureLeavesNothingBehind(t *testing.T) {
	for _, s := range scenes {
		for n := 1; ; n += stride() {
			w := newWorld(t)
			h := withMIG(w)
			p := w.plugin(t)
			s.before(t, w, h, p)
			w.scan()
			theirs := createForeignInstances(t, h, p)
			w.disk.FailAt(n, errors.New("no space left"))
			_ = s.call(t, p)
			if w.disk.Writes() < n {
				break
			}
			t.Run(fmt.Sprintf("%s, write %d", s.name, n), func(t *testing.T) {
				w.disk.Restart()
				checkAfterRecovery(t, w, h, theirs)
			})
		}
	}
}
