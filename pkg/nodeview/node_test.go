package nodeview

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

// world fakes what a Node looks at.
type world struct {
	mu       sync.Mutex
	snapshot inventory.Snapshot
	missing  []device.GPU
	lent     []device.GPU
	used     map[string]bool // GPUs that claims have for containers, by name
	usedErr  error
	claims   []predecessor.Claim
	err      error
	// changed signals a change of the missing GPUs. checkpoint is true after a change of the claims.
	changed    chan struct{}
	checkpoint bool
	node       *Node
}

func newWorld(s inventory.Snapshot) *world { return &world{snapshot: s, changed: make(chan struct{})} }

func (w *world) set(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// scan sets the result of a scan.
func (w *world) scan(s inventory.Snapshot) {
	w.set(func() { w.snapshot = s })
	w.node.Update()
}

// lose sets the GPUs that are missing.
func (w *world) lose(addresses ...device.PCIAddress) {
	w.set(func() {
		w.missing = nil
		for _, a := range addresses {
			w.missing = append(w.missing, gpu(a))
		}
		close(w.changed)
		w.changed = make(chan struct{})
	})
}

// hold sets the content of the reference driver's checkpoint.
func (w *world) hold(claims []predecessor.Claim, err error) {
	w.set(func() { w.claims, w.err, w.checkpoint = claims, err, true })
}

type (
	fakeInventory struct{ *world }
	fakeHealth    struct{ *world }
	fakeReference struct{ *world }
)

func (f fakeInventory) Snapshot() inventory.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.snapshot
}

func (f fakeHealth) Missing(inventory.Snapshot) []device.GPU {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.missing
}

func (f fakeHealth) Lent(inventory.Snapshot) []device.GPU {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lent
}

func (f fakeHealth) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f fakeReference) Claims() ([]predecessor.Claim, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checkpoint = false
	return f.claims, f.err
}

func (f fakeReference) Changed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.checkpoint
}

func (w *world) start() *Node {
	w.node = New(fakeInventory{w}, fakeHealth{w}, fakeReference{w}, w.inUse)
	return w.node
}

// inUse reports whether claims have the GPU for containers.
func (w *world) inUse(gpu string) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.used[gpu], w.usedErr
}

const first, second device.PCIAddress = "0000:1b:00.0", "0000:43:00.0"

func gpu(a device.PCIAddress) device.GPU { return device.GPU{PCIAddress: a, UUID: "GPU-" + string(a)} }

// ready returns the inventory of a node with GPUs at these addresses.
func ready(addresses ...device.PCIAddress) inventory.Snapshot {
	s := inventory.Snapshot{Ready: true, Known: true}
	for _, a := range addresses {
		s.Node.GPUs = append(s.Node.GPUs, nvidia.GPU{GPU: gpu(a)})
	}
	return s
}

func names(gpus []nvidia.GPU) string {
	all := make([]string, len(gpus))
	for i, g := range gpus {
		all[i] = string(g.PCIAddress)
	}
	return strings.Join(all, " ")
}

func TestViewNamesEveryReason(t *testing.T) {
	w := newWorld(ready(first))
	n := w.start()
	if v := n.View(); !v.Preparable.Ready || !v.Offered.Ready || v.Blocked() {
		t.Fatal("not ready without a condition")
	}
	n.Report(Condition{Source: "runtime", Message: "CDI is off"})
	n.Report(Condition{Source: "hook", Message: "noexec"})
	if v := n.View(); v.Preparable.Ready || v.Offered.Ready || !v.Blocked() || v.Preparable.Reason != "noexec; CDI is off" {
		t.Errorf("got %+v", v)
	}
	w.scan(inventory.Snapshot{Reason: "no driver"})
	if v := n.View(); v.Preparable.Reason != "no driver; noexec; CDI is off" || v.Inventory.Reason != "no driver" {
		t.Errorf("got %+v", v)
	}
	w.scan(ready(first))
	n.Clear("runtime")
	n.Clear("hook")
	if v := n.View(); !v.Preparable.Ready || v.Blocked() {
		t.Errorf("still not ready: %q", v.Preparable.Reason)
	}
}

func TestOneViewForEachChange(t *testing.T) {
	w := newWorld(ready(first))
	n := w.start()
	for what, change := range map[string]func(){
		"a scan":             func() { w.scan(ready(first, second)) },
		"a condition":        func() { n.Report(Condition{Source: "hook", Message: "noexec"}) },
		"another message":    func() { n.Report(Condition{Source: "hook", Message: "missing"}) },
		"a missing GPU":      func() { w.lose("0000:50:00.0"); n.Update() },
		"a claim":            func() { w.hold([]predecessor.Claim{{UID: "u-1"}}, nil) },
		"unreadable claims":  func() { w.hold(nil, errors.New("permission denied")) },
		"another such error": func() { w.hold(nil, errors.New("not JSON")) },
	} {
		before := n.View()
		change()
		now := n.View()
		if now.Generation != before.Generation+1 || n.View() != now {
			t.Errorf("%s: generation %d after %d", what, now.Generation, before.Generation)
		}
		select {
		case <-before.Changed():
		default:
			t.Errorf("%s: the View before does not tell", what)
		}
		if n.View() != now {
			t.Errorf("%s: another View without a change", what)
		}
		select {
		case <-now.Changed():
			t.Errorf("%s: a change without a newer View", what)
		default:
		}
	}
}

func TestMissingGPUStaysOfferedButIsNotPreparable(t *testing.T) {
	w := newWorld(ready(second))
	w.missing = []device.GPU{gpu(first)}
	v := w.start().View()
	if names(v.Preparable.Node.GPUs) != string(second) || names(v.Offered.Node.GPUs) != string(second+" "+first) ||
		names(v.GPUs) != string(second+" "+first) || names(v.Inventory.Node.GPUs) != string(second) {
		t.Errorf("%+v", v)
	}
}

func TestReferenceClaimsWithholdTheirGPUs(t *testing.T) {
	w := newWorld(ready(first))
	w.missing = []device.GPU{gpu(second)}
	w.claims = []predecessor.Claim{{UID: "u-1", Devices: []predecessor.Device{{Name: "gpu-1", GPUUUID: "GPU-" + string(second)}}}}
	n := w.start()
	// The claim's GPU is missing but known, so the other GPU can be prepared.
	if v := n.View(); names(v.Offered.Node.GPUs) != string(first) || names(v.Preparable.Node.GPUs) != string(first) ||
		len(v.Offered.Node.Problems) != 1 || !strings.Contains(v.Offered.Node.Problems[0].Message, "u-1") || len(v.GPUs) != 2 {
		t.Errorf("%+v", v)
	}
	w.hold(nil, errors.New("not JSON"))
	if v := n.View(); len(v.Offered.Node.GPUs)+len(v.Preparable.Node.GPUs) > 0 ||
		len(v.Preparable.Node.Problems) != 1 || !v.Preparable.Ready {
		t.Errorf("unreadable claims: %+v", v)
	}
}

func TestFirstLookEndsWithTheFirstScan(t *testing.T) {
	w := newWorld(inventory.Snapshot{Code: inventory.CodeNotScanned})
	n := w.start()
	looked := func() bool {
		select {
		case <-n.FirstLook():
			return true
		default:
			return false
		}
	}
	n.Report(Condition{Source: "hook"})
	if looked() {
		t.Error("before the first scan")
	}
	w.scan(inventory.Snapshot{Code: inventory.CodeDriverMissing})
	if !looked() {
		t.Error("after a scan that failed")
	}
	w.scan(ready(first)) // must not close the channel again
}

func TestRunFollowsEveryInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(ready(first))
		n := w.start()
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { n.Run(ctx) })
		expect := func(what string, follows time.Duration, change func()) {
			t.Helper()
			before := n.View()
			change()
			time.Sleep(follows) //nolint:forbidigo // simulated time
			synctest.Wait()
			if n.View().Generation != before.Generation+1 {
				t.Errorf("%s: generation %d after %d", what, n.View().Generation, before.Generation)
			}
		}
		expect("a scan", 0, func() { w.scan(ready(first, second)) })
		expect("a condition", 0, func() { n.Report(Condition{Source: "hook"}) })
		expect("its end", 0, func() { n.Clear("hook") })
		expect("a missing GPU", 0, func() { w.lose("0000:50:00.0") })
		expect("a claim", 0, func() { w.hold([]predecessor.Claim{{UID: "u-1"}}, nil) })
		expect("a note that the claim has ended", refreshInterval, func() { w.set(func() { w.claims = nil }) })
		stop()
		running.Wait()
	})
}

// Several goroutines report and clear conditions while others look. A View that is read after a
// call must have its effect.
func TestViewHasEveryFinishedChange(t *testing.T) {
	n := newWorld(ready(first)).start()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })
	var reporting sync.WaitGroup
	for i := range 4 {
		source := fmt.Sprint("source-", i)
		reporting.Go(func() {
			for range 200 {
				n.Report(Condition{Source: source, Message: source})
				if s := n.View().Preparable; s.Ready || !strings.Contains(s.Reason, source) {
					t.Errorf("%s is missing in %q", source, s.Reason)
				}
				n.Clear(source)
				if s := n.View().Preparable; strings.Contains(s.Reason, source) {
					t.Errorf("%s is still in %q", source, s.Reason)
				}
			}
		})
	}
	running.Go(func() {
		for v := n.View(); ctx.Err() == nil; v = n.View() {
			select {
			case <-ctx.Done():
			case <-v.Changed():
				if now := n.View(); now.Generation <= v.Generation {
					t.Errorf("generation %d after %d", now.Generation, v.Generation)
				}
			}
		}
	})
	reporting.Wait()
	stop()
	running.Wait()
	if v := n.View(); !v.Preparable.Ready {
		t.Errorf("left: %+v", v.Conditions)
	}
}

// Two callers may ask for the View when the checkpoint has changed. Neither may get the View before
// the change, because the other one is still computing the new View.
func TestEachCallerSeesChangedCheckpoint(t *testing.T) {
	w := newWorld(ready(first, second))
	node := w.start()
	for i := range 2000 {
		uid := types.UID(fmt.Sprint(i))
		w.hold([]predecessor.Claim{{UID: uid}}, nil)
		var callers sync.WaitGroup
		for range 4 {
			callers.Go(func() {
				if claims := node.View().ReferenceClaims; len(claims) != 1 || claims[0].UID != uid {
					t.Errorf("claims %v, want %s", claims, uid)
				}
			})
		}
		callers.Wait()
		if t.Failed() {
			return
		}
	}
}
