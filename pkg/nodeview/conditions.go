package nodeview

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// inventorySource is the source of the inventory's own condition. All others are reported.
const inventorySource = "inventory"

// Conditions has the readiness conditions that parts of the driver report now. Its methods may be
// called at the same time.
type Conditions struct {
	mu       sync.Mutex
	reported map[string]Condition // by source
	// shownUntil is when a condition that the slices showed last ended. The inventory's own condition
	// does not count, because no transient condition is reported at the same time.
	shownUntil time.Time
	changed    chan struct{} // closed at the next change
}

// NewConditions returns a Conditions that has none.
func NewConditions() *Conditions {
	return &Conditions{reported: map[string]Condition{}, changed: make(chan struct{})}
}

// Report sets the condition of n.Source. It sets n.Since itself.
func (c *Conditions) Report(n Condition) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, is := c.reported[n.Source]
	n.Since = last.Since
	if !is {
		n.Since = time.Now()
	}
	c.reported[n.Source] = n
	c.notify()
}

// Clear ends the condition of the source, if there is one.
func (c *Conditions) Clear(source string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended, is := c.reported[source]
	if !is {
		return
	}
	if now := time.Now(); !now.Before(c.withShownAtOnce(ended).due()) {
		c.shownUntil = now
	}
	delete(c.reported, source)
	c.notify()
}

// Changed returns a channel that is closed at the next Report or Clear.
func (c *Conditions) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

func (c *Conditions) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// all returns the reported conditions, sorted by source, and after them that of the snapshot s,
// which snapshot returns.
func (c *Conditions) all(snapshot func() inventory.Snapshot) (all []Condition, s inventory.Snapshot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, reported := range c.reported {
		all = append(all, c.withShownAtOnce(reported))
	}
	slices.SortFunc(all, func(a, b Condition) int { return cmp.Compare(a.Source, b.Source) })
	// A condition may move from a source to the inventory. It is not missed, because Clear waits.
	if s = snapshot(); s.Code != "" {
		all = append(all, c.withShownAtOnce(Condition{
			Source: inventorySource, Code: s.Code, Message: s.Reason, Transient: true, Types: NVIDIATypes, Since: s.Since,
		}))
	}
	return all, s
}

// withShownAtOnce returns n with shownAtOnce set or cleared. The caller holds c.mu.
func (c *Conditions) withShownAtOnce(n Condition) Condition {
	n.shownAtOnce = n.Since.Before(c.shownUntil)
	return n
}
