// A crash at any disk write or hardware call leaves nothing behind that the next calls do not put
// right.

package prepare_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
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

// deaths has the ways in which a plugin process can die, by name: killed, or with a power cut. Each
// function does to the fake node what that death does.
var deaths = map[string]func(*world){
	"kill -9":   func(w *world) { w.disk.Restart() },
	"power cut": func(w *world) { w.reboot() },
}

// checkConsistent fails the test unless the claim uid is either fully prepared or not prepared at
// all. It returns which of the two is the case.
func checkConsistent(t *testing.T, w *world, p *plugin, uid types.UID) (prepared bool) {
	t.Helper()
	r, found, err := p.Records.Load(uid)
	if err != nil {
		t.Fatalf("the record cannot be read: %v", err)
	}
	spec := w.specs.of(uid)
	switch {
	case !found && spec != "":
		t.Errorf("a spec without a record: %s", spec)
	case found && r.State != checkpoint.Prepared:
		t.Errorf("the record says %s", r.State)
	case found && r.BootID == w.bootID && spec == "":
		t.Error("a prepared claim without a spec")
	}
	for _, name := range w.records() {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			t.Errorf("%s is left over", name)
		}
	}
	return found
}

// leaveLockFile creates the lock file that a killed process would leave.
func leaveLockFile(t *testing.T, w *world, claim string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.locks, prepare.ClaimLock(types.UID("uid-"+claim)).File), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestInterruptedPrepareIsRecovered(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("bystander", allocated("r", gpu1)))
			dying := w.plugin(t)
			w.disk.StopAt(n)
			c := newClaim("c", allocated("r", gpu0))
			_, err := dying.Prepare(t.Context(), c)
			if !w.disk.Stopped() {
				if err != nil || n < 6 {
					t.Fatalf("%d writes: %v", n, err)
				}
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				leaveLockFile(t, w, "c")
				p := w.plugin(t)
				if err := p.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				if checkConsistent(t, w, p, "uid-c") {
					mustUnprepare(t, p, "uid-c")
				}
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
				mustUnprepare(t, p, "uid-next")
				mustPrepare(t, p, c)
				if !checkConsistent(t, w, p, "uid-bystander") {
					t.Error("another claim was lost")
				}
				mustUnprepare(t, p, "uid-c")
				mustUnprepare(t, p, "uid-bystander")
				checkClean(t, w)
			})
		}
	}
}

// After a crash the kubelet may call Prepare before Recover ran. Prepare must succeed without
// Recover, whichever disk write of the earlier Prepare was the last.
func TestPrepareAfterInterruptedPrepareNeedsNoRecovery(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			dying := w.plugin(t)
			w.disk.StopAt(n)
			c := newClaim("c", allocated("r", gpu0))
			_, _ = dying.Prepare(t.Context(), c)
			if !w.disk.Stopped() {
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				p := w.plugin(t)
				mustPrepare(t, p, c)
				if !checkConsistent(t, w, p, "uid-c") {
					t.Error("not prepared")
				}
			})
		}
	}
}

func TestInterruptedUnprepareIsRecovered(t *testing.T) {
	for name, end := range deaths {
		for n := 1; ; n++ {
			w := newWorld(t)
			c := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, w.plugin(t), c)
			dying := w.plugin(t)
			w.disk.StopAt(n)
			_ = dying.Unprepare(t.Context(), "uid-c")
			if !w.disk.Stopped() {
				break
			}
			t.Run(fmt.Sprintf("%s at write %d", name, n), func(t *testing.T) {
				end(w)
				p := w.plugin(t)
				if err := p.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
				checkConsistent(t, w, p, "uid-c")
				mustUnprepare(t, p, "uid-c")
				checkClean(t, w)
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			})
		}
	}
}

func TestInterruptedRecoveryIsFinishedByTheNext(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		dying := w.plugin(t)
		w.disk.StopAt(4) // the spec is written, the record is not
		_, _ = dying.Prepare(t.Context(), newClaim("c", allocated("r", gpu0)))
		w.disk.Restart()
		p := w.plugin(t)
		w.disk.StopAt(n)
		_ = p.Recover(t.Context())
		if !w.disk.Stopped() {
			checkClean(t, w)
			return
		}
		w.disk.Restart()
		p = w.plugin(t)
		if err := p.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		checkClean(t, w)
	}
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

// scene describes a fake node and a call on it. The tests let the call fail at every possible
// point.
type scene struct {
	name string
	// before sets up the fake node for the call.
	before func(*testing.T, *world, *hardware, *plugin)
	call   func(*testing.T, *plugin) error
}

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
		h.of(t, gpu0).RemoveInstances()
		h.of(t, gpu0).Enabled = false
		h.createForeign(t, gpu1, 9, 0)
	}, func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), several); return err }},
	{"reconcile after a reset", func(t *testing.T, w *world, h *hardware, p *plugin) {
		mustPrepare(t, p, several)
		h.of(t, gpu1).RemoveInstances()
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

// createForeignInstances returns the MIG instances on the node that no claim's record explains, so
// those of an admin.
func createForeignInstances(t *testing.T, h *hardware, p *plugin) []device.Instance {
	t.Helper()
	var theirs []device.Instance
	for _, gpu := range []string{gpu0, gpu1} {
		there := h.of(t, gpu).State().MIG.Instances
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
		if call != "query" {
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
