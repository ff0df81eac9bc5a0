package nodeview

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// inventorySource is the source of the inventory's own condition. All others are reported.
const inventorySource = "inventory"

// Check finds out whether the host can run containers with this driver's devices. A new one needs
// a type that implements it, with its code, and a place in the driver's list.
type Check interface {
	// Source names the check in its condition.
	Source() string
	// Look returns the condition, or nil if there is none. If known is false, the last answer stays.
	Look(ctx context.Context) (c *Condition, known bool)
}

// Check lets the checks look, one after another, and reports or clears their conditions.
func (n *Node) Check(ctx context.Context, checks []Check) {
	for _, check := range checks {
		switch now, known := check.Look(ctx); {
		case !known:
		case now == nil:
			n.Clear(check.Source())
		default:
			now.Source = check.Source()
			n.Report(*now)
		}
	}
}

// Report sets the condition of c.Source, and c.Since itself. When it returns, the View has it.
func (n *Node) Report(c Condition) {
	n.mu.Lock()
	defer n.mu.Unlock()
	last, is := n.reported[c.Source]
	c.Since = last.Since
	if !is {
		c.Since = time.Now()
	}
	n.reported[c.Source] = c
	n.update()
}

// Clear ends the condition of the source, if there is one. When it returns, the View lacks it.
func (n *Node) Clear(source string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ended, is := n.reported[source]
	if !is {
		return
	}
	if now := time.Now(); !now.Before(n.withShownAtOnce(ended).due()) {
		n.shownUntil = now
	}
	delete(n.reported, source)
	n.update()
}

// conditions returns the reported conditions, sorted by source, and after them that of the snapshot
// s. The caller holds n.mu, and has read s under it. So a condition that moves from a source to the
// inventory is not missed: Clear waits.
func (n *Node) conditions(s inventory.Snapshot) []Condition {
	var all []Condition
	for _, reported := range n.reported {
		all = append(all, n.withShownAtOnce(reported))
	}
	slices.SortFunc(all, func(a, b Condition) int { return cmp.Compare(a.Source, b.Source) })
	if s.Code != "" {
		all = append(all, n.withShownAtOnce(Condition{
			Source: inventorySource, Code: s.Code, Message: s.Reason, Transient: true, Types: NVIDIATypes, Since: s.Since,
		}))
	}
	return all
}

// withShownAtOnce returns c with shownAtOnce set or cleared. The caller holds n.mu.
func (n *Node) withShownAtOnce(c Condition) Condition {
	c.shownAtOnce = c.Since.Before(n.shownUntil)
	return c
}
