package driver

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// These are the codes of conditions: values of the taint not-ready, which docs/operations.md lists.
// Package inventory has further codes.
const (
	codeCDIDisabled  = "cdi-disabled"
	codeCDIDirectory = "cdi-directory"
	codeHookMissing  = "hook-missing"
	codeBaseSpec     = "base-spec-unwritable"
	codeReleased     = "hardware-released"
	codeDevicePlugin = "device-plugin"
)

// transientGrace is how long a transient condition must last before the slices show it. Without
// this grace, a driver reload or a disk that is full for a moment would rewrite every slice twice.
const transientGrace = 30 * time.Second

// nvidiaTypes are the device types that cannot be prepared without NVIDIA's driver, as in the
// attribute "type".
var nvidiaTypes = []string{"gpu", "mig"}

// condition is one reason why the node refuses to prepare devices.
type condition struct {
	// source names the part of the driver that reports the condition. Each source has at most one
	// condition.
	source string
	// code is the condition's value in taints, for programs. message is for people.
	code, message string
	// transient means that the condition may end without an admin's help.
	transient bool
	// types are the device types that the condition affects, as in the attribute "type" without
	// "-share". Nil means all.
	types []string
	// since is when the source began to report a condition. It does not change when the source
	// replaces one condition by another.
	since time.Time
	// shownAtOnce means that the condition began while the slices showed another one, so it has no
	// transientGrace. Otherwise Pods could be scheduled to the node in the gap between the two taints.
	shownAtOnce bool
}

// due returns when the slices must show the condition.
func (c condition) due() time.Time {
	if c.transient && !c.shownAtOnce {
		return c.since.Add(transientGrace)
	}
	return c.since
}

func (c condition) affects(deviceType string) bool {
	return c.types == nil || slices.Contains(c.types, strings.TrimSuffix(deviceType, "-share"))
}

// shownCondition returns the condition that the slices show for the device type: the one that is
// due first, so that a later condition rewrites no slice. shown is true if that condition is due at
// the time now, pending if it is due later. Without a condition both are false.
func shownCondition(
	conditions []condition, deviceType string, now time.Time,
) (_ condition, shown, pending bool) {
	var first *condition
	for i, c := range conditions {
		if c.affects(deviceType) && (first == nil || c.due().Before(first.due())) {
			first = &conditions[i]
		}
	}
	switch {
	case first == nil:
		return condition{}, false, false
	case now.Before(first.due()):
		return condition{}, false, true
	default:
		return *first, true, false
	}
}

// readiness combines the inventory's reasons for refusing claims with the conditions that other
// parts of the driver report.
type readiness struct {
	inv inventorySource
	// changed is called when a source reports a condition with a new code and when a condition ends.
	// It must not block.
	changed func()

	mu       sync.Mutex
	reported map[string]condition // by source
	// shownUntil is when a condition that the slices showed last ended. The inventory's own condition
	// does not count, because no transient condition is reported at the same time.
	shownUntil time.Time
}

func newReadiness(inv inventorySource, changed func()) *readiness {
	return &readiness{inv: inv, changed: changed, reported: map[string]condition{}}
}

// Report sets the condition of c.source. It sets c.since itself.
func (r *readiness) Report(c condition) {
	r.mu.Lock()
	last, is := r.reported[c.source]
	c.since = last.since
	if !is {
		c.since = time.Now()
	}
	r.reported[c.source] = c
	r.mu.Unlock()
	if !is || last.code != c.code {
		r.changed()
	}
}

// Clear ends the condition of the source, if there is one.
func (r *readiness) Clear(source string) {
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
func (r *readiness) Blocked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reported) > 0
}

// Snapshot returns the inventory's snapshot. If there are reported conditions, the snapshot is not
// ready, and their messages are added to its reason.
func (r *readiness) Snapshot() inventory.Snapshot {
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
		reasons = append(reasons, c.message)
	}
	s.Ready = false
	s.Reason = strings.Join(reasons, "; ")
	return s
}

// Conditions returns the reported conditions and the inventory's.
func (r *readiness) Conditions() []condition {
	all := r.bySource() // read before the inventory, so that a condition that moves there is not missed
	s := r.inv.Snapshot()
	if s.Code == "" {
		return all
	}
	c := condition{
		source: "inventory", code: s.Code, message: s.Reason,
		transient: true, types: nvidiaTypes, since: s.Since,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(all, r.withShownAtOnce(c))
}

// withShownAtOnce returns c with shownAtOnce set or cleared. The caller holds r.mu.
func (r *readiness) withShownAtOnce(c condition) condition {
	c.shownAtOnce = c.since.Before(r.shownUntil)
	return c
}

// Due says whether the slices must show that the node is not ready. due is true if a condition is
// due at the time now, pending if one is due later.
func (r *readiness) Due(now time.Time) (due, pending bool) {
	for _, c := range r.Conditions() {
		due = due || !now.Before(c.due())
		pending = pending || now.Before(c.due())
	}
	return due, pending
}

func (r *readiness) bySource() []condition {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]condition, 0, len(r.reported))
	for _, c := range r.reported {
		all = append(all, r.withShownAtOnce(c))
	}
	slices.SortFunc(all, func(a, b condition) int { return cmp.Compare(a.source, b.source) })
	return all
}
