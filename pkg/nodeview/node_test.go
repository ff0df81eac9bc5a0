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
	claims   []predecessor.Claim
	err      error
	// scanned and changed signal changes of the inventory and of the missing GPUs.
	scanned, changed chan struct{}
}

func newWorld(s inventory.Snapshot) *world {
	return &world{snapshot: s, scanned: make(chan struct{}, 1), changed: make(chan struct{})}
}

func (w *world) set(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// scan sets the result of a scan.
func (w *world) scan(s inventory.Snapshot) {
	w.set(func() { w.snapshot = s })
	select {
	case w.scanned <- struct{}{}:
	default:
	}
}

type (
	fakeInventory struct{ *world }
	fakeHealth    struct{ *world }
	fakeReference struct{ *world }
)

func (f fakeInventory) Changed() <-chan struct{} { return f.scanned }

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

func (f fakeHealth) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f fakeReference) Claims() ([]predecessor.Claim, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.claims, f.err
}

func (w *world) node(c *Conditions) *Node {
	return New(fakeInventory{w}, c, fakeHealth{w}, fakeReference{w})
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
	w, c := newWorld(ready(first)), NewConditions()
	n := w.node(c)
	if v := n.View(); !v.Preparable.Ready || !v.Offered.Ready || v.Blocked() {
		t.Fatal("not ready without a condition")
	}
	c.Report(Condition{Source: "runtime", Message: "CDI is off"})
	c.Report(Condition{Source: "hook", Message: "noexec"})
	if v := n.Refresh(); v.Preparable.Ready || v.Offered.Ready || !v.Blocked() || v.Preparable.Reason != "noexec; CDI is off" {
		t.Errorf("got %+v", v)
	}
	w.scan(inventory.Snapshot{Reason: "no driver"})
	if v := n.Refresh(); v.Preparable.Reason != "no driver; noexec; CDI is off" || v.Inventory.Reason != "no driver" {
		t.Errorf("got %+v", v)
	}
	w.scan(ready(first))
	c.Clear("runtime")
	c.Clear("hook")
	if v := n.Refresh(); !v.Preparable.Ready || v.Blocked() {
		t.Errorf("still not ready: %q", v.Preparable.Reason)
	}
}

func TestOneViewForEachChange(t *testing.T) {
	w, c := newWorld(ready(first)), NewConditions()
	n := w.node(c)
	for what, change := range map[string]func(){
		"a scan":             func() { w.scan(ready(first, second)) },
		"a condition":        func() { c.Report(Condition{Source: "hook", Message: "noexec"}) },
		"another message":    func() { c.Report(Condition{Source: "hook", Message: "missing"}) },
		"a missing GPU":      func() { w.set(func() { w.missing = []device.GPU{gpu("0000:50:00.0")} }) },
		"a claim":            func() { w.set(func() { w.claims = []predecessor.Claim{{UID: "u-1"}} }) },
		"unreadable claims":  func() { w.set(func() { w.claims, w.err = nil, errors.New("permission denied") }) },
		"another such error": func() { w.set(func() { w.err = errors.New("not JSON") }) },
	} {
		before := n.Refresh()
		change()
		now := n.Refresh()
		if now.Generation != before.Generation+1 || n.View() != now {
			t.Errorf("%s: generation %d after %d", what, now.Generation, before.Generation)
		}
		select {
		case <-before.Changed():
		default:
			t.Errorf("%s: the View before does not tell", what)
		}
		if n.Refresh() != now {
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
	v := w.node(NewConditions()).View()
	if names(v.Preparable.Node.GPUs) != string(second) || names(v.Offered.Node.GPUs) != string(second+" "+first) ||
		names(v.GPUs) != string(second+" "+first) || names(v.Inventory.Node.GPUs) != string(second) {
		t.Errorf("%+v", v)
	}
}

func TestReferenceClaimsWithholdTheirGPUs(t *testing.T) {
	w := newWorld(ready(first))
	w.missing = []device.GPU{gpu(second)}
	w.claims = []predecessor.Claim{{UID: "u-1", Devices: []predecessor.Device{{Name: "gpu-1", GPUUUID: "GPU-" + string(second)}}}}
	n := w.node(NewConditions())
	// The claim's GPU is missing but known, so the other GPU can be prepared.
	if v := n.View(); names(v.Offered.Node.GPUs) != string(first) || names(v.Preparable.Node.GPUs) != string(first) ||
		len(v.Offered.Node.Problems) != 1 || !strings.Contains(v.Offered.Node.Problems[0].Message, "u-1") || len(v.GPUs) != 2 {
		t.Errorf("%+v", v)
	}
	w.set(func() { w.claims, w.err = nil, errors.New("not JSON") })
	if v := n.Refresh(); len(v.Offered.Node.GPUs)+len(v.Preparable.Node.GPUs) > 0 ||
		len(v.Preparable.Node.Problems) != 1 || !v.Preparable.Ready {
		t.Errorf("unreadable claims: %+v", v)
	}
}

func TestFirstLookEndsWithTheFirstScan(t *testing.T) {
	w := newWorld(inventory.Snapshot{Code: inventory.CodeNotScanned})
	c := NewConditions()
	n := w.node(c)
	looked := func() bool {
		select {
		case <-n.FirstLook():
			return true
		default:
			return false
		}
	}
	c.Report(Condition{Source: "hook"})
	if n.Refresh(); looked() {
		t.Error("before the first scan")
	}
	w.scan(inventory.Snapshot{Code: inventory.CodeDriverMissing})
	if n.Refresh(); !looked() {
		t.Error("after a scan that failed")
	}
	w.scan(ready(first))
	n.Refresh() // must not close the channel again
}

func TestRunFollowsEveryInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, c := newWorld(ready(first)), NewConditions()
		n := w.node(c)
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
		expect("a condition", 0, func() { c.Report(Condition{Source: "hook"}) })
		expect("its end", 0, func() { c.Clear("hook") })
		expect("a missing GPU", 0, func() {
			w.set(func() {
				w.missing = []device.GPU{gpu("0000:50:00.0")}
				close(w.changed)
				w.changed = make(chan struct{})
			})
		})
		expect("a claim", refreshInterval, func() { w.set(func() { w.claims = []predecessor.Claim{{UID: "u-1"}} }) })
		stop()
		running.Wait()
	})
}

// Several goroutines report and clear conditions while others look. A Refresh that begins after a
// call must have its effect.
func TestRefreshHasEveryFinishedChange(t *testing.T) {
	w, c := newWorld(ready(first)), NewConditions()
	n := w.node(c)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })
	var reporting sync.WaitGroup
	for i := range 4 {
		source := fmt.Sprint("source-", i)
		reporting.Go(func() {
			for range 200 {
				c.Report(Condition{Source: source, Message: source})
				if s := n.Refresh().Preparable; s.Ready || !strings.Contains(s.Reason, source) {
					t.Errorf("%s is missing in %q", source, s.Reason)
				}
				c.Clear(source)
				if s := n.Refresh().Preparable; strings.Contains(s.Reason, source) {
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
	if v := n.Refresh(); !v.Preparable.Ready {
		t.Errorf("left: %+v", v.Conditions)
	}
}
