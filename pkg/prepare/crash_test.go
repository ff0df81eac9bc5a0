// A crash at any disk write or hardware call leaves nothing behind that the next calls do not put
// right.

package prepare_test

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

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

func TestInterruptedPrepareIsRecovered(t *testing.T) {
	for _, death := range deaths {
		death.everywhere(t, 5, func(t *testing.T) attempt {
			w := newWorld(t)
			mustPrepare(t, w.plugin(t), newClaim("bystander", allocated("r", gpu1)))
			c := newClaim("c", allocated("r", gpu0))
			return attempt{w, prepares(c).on(t, w.plugin(t)), func(t *testing.T) {
				p := w.plugin(t)
				reconcileTwice(t, p)
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
			}}
		})
	}
}

// After a crash the kubelet may call Prepare before Reconcile ran. Prepare must succeed without
// Reconcile, whichever disk write of the earlier Prepare was the last.
func TestPrepareAfterInterruptedPrepareNeedsNoRecovery(t *testing.T) {
	for _, death := range deaths {
		death.everywhere(t, 5, func(t *testing.T) attempt {
			w := newWorld(t)
			c := newClaim("c", allocated("r", gpu0))
			return attempt{w, prepares(c).on(t, w.plugin(t)), func(t *testing.T) {
				p := w.plugin(t)
				mustPrepare(t, p, c)
				if !checkConsistent(t, w, p, "uid-c") {
					t.Error("not prepared")
				}
			}}
		})
	}
}

func TestInterruptedUnprepareIsRecovered(t *testing.T) {
	for _, death := range deaths {
		death.everywhere(t, 1, func(t *testing.T) attempt {
			w := newWorld(t)
			c := newClaim("c", allocated("r", gpu0))
			mustPrepare(t, w.plugin(t), c)
			return attempt{w, unprepares(c).on(t, w.plugin(t)), func(t *testing.T) {
				p := w.plugin(t)
				reconcileTwice(t, p)
				checkConsistent(t, w, p, "uid-c")
				mustUnprepare(t, p, "uid-c")
				checkClean(t, w)
				mustPrepare(t, p, newClaim("next", allocated("r", gpu0)))
			}}
		})
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
		_ = p.Reconcile(t.Context())
		if !w.disk.Stopped() {
			checkClean(t, w)
			return
		}
		w.disk.Restart()
		p = w.plugin(t)
		reconcileTwice(t, p)
		checkClean(t, w)
	}
}

// reconcileTwice runs two passes, because the first one may skip the garbage of a claim that it
// repairs at the same time.
func reconcileTwice(t *testing.T, p *plugin) {
	t.Helper()
	for range 2 {
		if err := p.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// scene describes a fake node and a call on it. The tests let the call fail at every possible
// point.
type scene struct {
	name string
	// before sets up the fake node for the call.
	before func(*testing.T, *world, *hardware, *plugin)
	call   call
}

// call is a call of the plugin that a test interrupts.
type call func(*testing.T, *plugin) error

func prepares(c *resourceapi.ResourceClaim) call {
	return func(t *testing.T, p *plugin) error { _, err := p.Prepare(t.Context(), c); return err }
}

func unprepares(c *resourceapi.ResourceClaim) call {
	return func(t *testing.T, p *plugin) error { return p.Unprepare(t.Context(), c.UID) }
}

func reconciles(t *testing.T, p *plugin) error { return p.Reconcile(t.Context()) }

// on returns the call to plugin process p.
func (c call) on(t *testing.T, p *plugin) func() error { return func() error { return c(t, p) } }

var scenes = []scene{
	{"prepare", func(t *testing.T, w *world, h *hardware, _ *plugin) {
		h.createForeign(t, gpu1, 9, 0) // gpu0's mode is off, gpu1's is on
	}, prepares(several)},
	{"unprepare", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, several)
	}, unprepares(several)},
	{"prepare again after a reset", func(t *testing.T, w *world, h *hardware, p *plugin) {
		mustPrepare(t, p, several)
		h.of(t, gpu0).RemoveInstances()
		h.of(t, gpu0).Enabled = false
		h.createForeign(t, gpu1, 9, 0)
	}, prepares(several)},
	{"reconcile after a reset", func(t *testing.T, w *world, h *hardware, p *plugin) {
		mustPrepare(t, p, several)
		h.of(t, gpu1).RemoveInstances()
		h.createForeign(t, gpu1, 9, 0)
		w.scan()
	}, reconciles},
	{"another allocation", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("c", allocated("a", large0)))
	}, prepares(several)},
	{"prepare the whole GPU after partitions", func(t *testing.T, w *world, h *hardware, p *plugin) {
		h.createForeign(t, gpu1, 9, 0)
		mustPrepare(t, p, newClaim("before", allocated("a", small0)))
		mustUnprepare(t, p, "uid-before")
	}, prepares(newClaim("c", allocated("a", gpu0)))},
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

// checkAfterRecovery starts a new plugin process. It fails the test unless Reconcile
// repairs the node and claims can be prepared again. The instances in "theirs" are the admin's.
func checkAfterRecovery(t *testing.T, w *world, h *hardware, theirs []device.Instance) {
	t.Helper()
	h.fault = nil
	p := w.plugin(t)
	if err := p.Reconcile(t.Context()); err != nil {
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

func TestInterruptedCallsLeaveNothingBehind(t *testing.T) {
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			begin := func(t *testing.T) attempt {
				w := newWorld(t)
				h := withMIG(w)
				p := w.plugin(t)
				s.before(t, w, h, p)
				w.scan()
				theirs, boot := createForeignInstances(t, h, p), w.bootID
				h.takeCalls()
				return attempt{w, s.call.on(t, p), func(t *testing.T) {
					if w.bootID != boot {
						theirs = nil
					}
					checkAfterRecovery(t, w, h, theirs)
				}}
			}
			for _, interrupted := range atCalls {
				interrupted.everywhere(t, 1, begin)
			}
			for _, interrupted := range atWrites {
				interrupted.everywhere(t, 5, begin)
			}
		})
	}
}
