package nodeview

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// Inventory returns the node's devices as of the last scan.
type Inventory interface {
	Snapshot() inventory.Snapshot
}

// Readiness combines the inventory's reasons for refusing claims with the conditions that other
// parts of the driver report.
type Readiness struct {
	inv Inventory
	// changed is called when a source reports a condition with a new code and when a condition ends.
	// It must not block.
	changed func()

	mu       sync.Mutex
	reported map[string]Condition // by source
	// shownUntil is when a condition that the slices showed last ended. The inventory's own condition
	// does not count, because no transient condition is reported at the same time.
	shownUntil time.Time
}

func NewReadiness(inv Inventory, changed func()) *Readiness {
	return &Readiness{inv: inv, changed: changed, reported: map[string]Condition{}}
}

// Report sets the condition of c.Source. It sets c.Since itself.
func (r *Readiness) Report(c Condition) {
	r.mu.Lock()
	last, is := r.reported[c.Source]
	c.Since = last.Since
	if !is {
		c.Since = time.Now()
	}
	r.reported[c.Source] = c
	r.mu.Unlock()
	if !is || last.Code != c.Code {
		r.changed()
	}
}

// Clear ends the condition of the source, if there is one.
func (r *Readiness) Clear(source string) {
	r.mu.Lock()
	c, is := r.reported[source]
	if now := time.Now(); is && !now.Before(r.withShownAtOnce(c).due()) {
		r.shownUntil = now
	}
	delete(r.reported, source)
	r.mu.Unlock()
	if is {
		r.changed()
	}
}

// Blocked reports whether any source other than the inventory has a condition.
func (r *Readiness) Blocked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reported) > 0
}

// Snapshot returns the inventory's snapshot. If there are reported conditions, the snapshot is not
// ready, and their messages are added to its reason.
func (r *Readiness) Snapshot() inventory.Snapshot {
	s := r.inv.Snapshot()
	reported := r.bySource()
	if len(reported) == 0 {
		return s
	}
	var reasons []string
	if s.Reason != "" {
		reasons = append(reasons, s.Reason)
	}
	for _, c := range reported {
		reasons = append(reasons, c.Message)
	}
	s.Ready = false
	s.Reason = strings.Join(reasons, "; ")
	return s
}

// Conditions returns the reported conditions and the inventory's.
func (r *Readiness) Conditions() []Condition {
	all := r.bySource() // read before the inventory, so that a condition that moves there is not missed
	s := r.inv.Snapshot()
	if s.Code == "" {
		return all
	}
	c := Condition{
		Source: "inventory", Code: s.Code, Message: s.Reason,
		Transient: true, Types: NVIDIATypes, Since: s.Since,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(all, r.withShownAtOnce(c))
}

// withShownAtOnce returns c with shownAtOnce set or cleared. The caller holds r.mu.
func (r *Readiness) withShownAtOnce(c Condition) Condition {
	c.shownAtOnce = c.Since.Before(r.shownUntil)
	return c
}

// Due says whether the slices must show that the node is not ready. due is true if a condition is
// due at the time now, pending if one is due later.
func (r *Readiness) Due(now time.Time) (due, pending bool) {
	for _, c := range r.Conditions() {
		due = due || !now.Before(c.due())
		pending = pending || now.Before(c.due())
	}
	return due, pending
}

func (r *Readiness) bySource() []Condition {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Condition, 0, len(r.reported))
	for _, c := range r.reported {
		all = append(all, r.withShownAtOnce(c))
	}
	slices.SortFunc(all, func(a, b Condition) int { return cmp.Compare(a.Source, b.Source) })
	return all
}
