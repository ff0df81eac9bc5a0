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

// refreshInterval is how often Run looks at what changes without a signal.
const refreshInterval = 5 * time.Second

// Inventory knows the node's GPUs as of the last scan. After each change it calls [Node.Update].
type Inventory interface {
	Snapshot() inventory.Snapshot
}

// Health knows the GPUs that are unhealthy.
type Health interface {
	// Missing returns the unhealthy GPUs that s lacks but that must stay offered, with a taint.
	Missing(s inventory.Snapshot) []device.GPU
	// Lent returns the GPUs that claims have for virtual machines, and that NVML therefore does not
	// list.
	Lent(s inventory.Snapshot) []device.GPU
	// Changed returns a channel that is closed at the next change of what Missing returns.
	Changed() <-chan struct{}
}

// ReferenceDriver knows the claims that NVIDIA's DRA driver prepared and that have not ended.
type ReferenceDriver interface {
	Claims() ([]predecessor.Claim, error)
	// Changed reports whether Claims must be called again, because its last answer may be outdated.
	Changed() bool
}

// Node keeps the newest [View] of the node.
type Node struct {
	inventory Inventory
	health    Health
	reference ReferenceDriver
	// inUse reports whether a claim has the GPU or a part of it for containers.
	inUse func(gpu string) (bool, error)

	mu       sync.Mutex           // serializes updates, and guards the fields before view
	reported map[string]Condition // by source
	// shownUntil is when a condition that the slices showed last ended. The inventory's own condition
	// does not count, because no transient condition is reported at the same time.
	shownUntil time.Time
	// configured are the policies from the configuration that the Node's labels choose. annotated are
	// those from the Node's annotations, which take precedence. They are nil until they are known.
	configured, annotated *device.Policies
	held                  map[device.PCIAddress]time.Time // see inputs.Held

	view      atomic.Pointer[View]
	firstLook chan struct{}
}

// New returns a Node with its first View. inUse reports whether a claim's record, of any boot, has
// the GPU or a part of it for containers.
func New(i Inventory, h Health, r ReferenceDriver, inUse func(gpu string) (bool, error)) *Node {
	n := &Node{
		inventory: i, health: h, reference: r, inUse: inUse, reported: map[string]Condition{}, firstLook: make(chan struct{}),
	}
	n.Update()
	return n
}

// View returns the newest View. NVIDIA's DRA driver may still prepare claims while this plugin
// starts, and nothing signals that. So each call checks its checkpoint, which costs one stat.
func (n *Node) View() *View {
	n.mu.Lock() // while another caller reads the changed checkpoint, the View is outdated
	defer n.mu.Unlock()
	if n.reference.Changed() {
		n.update()
	}
	return n.view.Load()
}

// Snapshot returns the devices that may be prepared now. It is for the prepare transaction.
func (n *Node) Snapshot() inventory.Snapshot { return n.View().Preparable }

// FirstLook returns a channel that is closed when the result of the first scan is in a View. That
// scan may have failed.
func (n *Node) FirstLook() <-chan struct{} { return n.firstLook }

// Run follows the health of the GPUs, and what changes without a signal, until the context ends.
func (n *Node) Run(ctx context.Context) {
	for {
		health := n.health.Changed() // before Update, so that no change is missed
		n.Update()
		select {
		case <-ctx.Done():
			return
		case <-health:
		case <-time.After(refreshInterval):
		}
	}
}

// Update computes a new View, unless nothing has changed.
func (n *Node) Update() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.update()
}

// update is Update for callers that hold n.mu.
func (n *Node) update() {
	scanned := n.inventory.Snapshot()
	in := inputs{Inventory: n.withPassthrough(scanned, n.health.Lent(scanned)), Held: n.held}
	in.Conditions = n.conditions(in.Inventory)
	in.missing = n.health.Missing(in.Inventory)
	claims, err := n.reference.Claims()
	if in.ReferenceClaims = claims; err != nil {
		in.ReferenceErr = err.Error()
	}
	last, generation := n.view.Load(), uint64(1)
	if last != nil {
		if reflect.DeepEqual(last.inputs, in) {
			return
		}
		generation = last.Generation + 1
	}
	v := in.view(generation)
	n.view.Store(v)
	if last != nil {
		close(last.changed)
	}
	looked := func(s inventory.Snapshot) bool { return s.Code != inventory.CodeNotScanned }
	if looked(v.Inventory) && (last == nil || !looked(last.Inventory)) {
		close(n.firstLook)
	}
}
