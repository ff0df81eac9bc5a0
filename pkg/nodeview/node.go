package nodeview

import (
	"context"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

// refreshInterval is how often Run looks at the inputs that signal no change.
const refreshInterval = 5 * time.Second

// Inventory knows the node's GPUs as of the last scan. A Node is the only reader of Changed.
type Inventory interface {
	Snapshot() inventory.Snapshot
	Changed() <-chan struct{}
}

// Health knows the GPUs that are unhealthy.
type Health interface {
	// Missing returns the unhealthy GPUs that s lacks but that must stay offered, with a taint.
	Missing(s inventory.Snapshot) []device.GPU
	// Changed returns a channel that is closed at the next change of what Missing returns.
	Changed() <-chan struct{}
}

// ReferenceDriver knows the claims that NVIDIA's DRA driver prepared and that have not ended.
type ReferenceDriver interface {
	Claims() ([]predecessor.Claim, error)
}

// Node keeps the newest [View] of the node.
type Node struct {
	inventory  Inventory
	conditions *Conditions
	health     Health
	reference  ReferenceDriver

	mu        sync.Mutex // serializes Refresh
	view      atomic.Pointer[View]
	firstLook chan struct{}
}

// New returns a Node with its first View.
func New(i Inventory, c *Conditions, h Health, r ReferenceDriver) *Node {
	n := &Node{inventory: i, conditions: c, health: h, reference: r, firstLook: make(chan struct{})}
	n.Refresh()
	return n
}

// Conditions returns the conditions that parts of the driver report.
func (n *Node) Conditions() *Conditions { return n.conditions }

// View returns the newest View. It never blocks.
func (n *Node) View() *View { return n.view.Load() }

// FirstLook returns a channel that is closed when the result of the first scan is in a View. That
// scan may have failed.
func (n *Node) FirstLook() <-chan struct{} { return n.firstLook }

// Snapshot returns the devices that may be prepared now. It is for the prepare transaction, when it
// has waited for another claim and when it repairs claims.
func (n *Node) Snapshot() inventory.Snapshot { return n.Refresh().Preparable }

// Run follows the changes of the inputs until the context ends.
func (n *Node) Run(ctx context.Context) {
	for {
		conditions, health := n.conditions.Changed(), n.health.Changed() // before Refresh, so that no change is missed
		n.Refresh()
		select {
		case <-ctx.Done():
			return
		case <-n.inventory.Changed():
		case <-conditions:
		case <-health:
		case <-time.After(refreshInterval):
		}
	}
}

// Refresh returns a View that has every change that ended before the call. If nothing has changed,
// that is the newest View.
func (n *Node) Refresh() *View {
	n.mu.Lock()
	defer n.mu.Unlock()
	in := n.look()
	last := n.view.Load()
	if last != nil && reflect.DeepEqual(last.inputs, in) {
		return last
	}
	generation := uint64(1)
	if last != nil {
		generation = last.Generation + 1
	}
	v := in.view(generation)
	n.view.Store(v)
	if last != nil {
		close(last.changed)
	}
	scanned := func(s inventory.Snapshot) bool { return s.Code != inventory.CodeNotScanned }
	if scanned(v.Inventory) && (last == nil || !scanned(last.Inventory)) {
		close(n.firstLook)
	}
	return v
}

func (n *Node) look() inputs {
	in := inputs{}
	in.conditions, in.inventory = n.conditions.all(n.inventory.Snapshot)
	in.missing = n.health.Missing(in.inventory)
	claims, err := n.reference.Claims()
	if in.claims = claims; err != nil {
		in.claimsErr = err.Error()
	}
	return in
}
