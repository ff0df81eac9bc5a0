package driver

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// Codes of readiness conditions, beside those of package inventory: values of the taint not-ready,
// which docs/operations.md lists.
const (
	codeCDIDisabled  = "cdi-disabled"
	codeCDIDirectory = "cdi-directory"
	codeHookMissing  = "hook-missing"
	codeBaseSpec     = "base-spec-unwritable"
	codeReleased     = "hardware-released"
	codeDevicePlugin = "device-plugin"
)

// passingGrace is how long a condition that may pass by itself leaves no trace in the slices. A driver
// that is loaded again, or a full disk for a moment, must not rewrite every slice twice.
const passingGrace = 30 * time.Second

// nvidiaTypes are the types of devices that need NVIDIA's driver on the node.
var nvidiaTypes = []string{"gpu", "mig"}

// condition is one reason why the node refuses to prepare devices.
type condition struct {
	// source reports it. A source has one condition at a time.
	source string
	// code is a label value for programs, message is for people.
	code, message string
	// passing conditions may end without anybody's help.
	passing bool
	// types of devices are affected, as the attribute "type" says without "-share"; all if nil.
	types []string
	// since is when the source first reported a condition, after it had none.
	since time.Time
	// follows says that it began before one ended that the slices showed. Then they show it at once:
	// without a taint, Pods would be scheduled to a node that still refuses them.
	follows bool
}

// due is when the slices show the condition.
func (c condition) due() time.Time {
	if c.passing && !c.follows {
		return c.since.Add(passingGrace)
	}
	return c.since
}

func (c condition) affects(deviceType string) bool {
	return c.types == nil || slices.Contains(c.types, strings.TrimSuffix(deviceType, "-share"))
}

// blocking is the condition that the slices show for devices of a type: the one that was due first, so
// that one which comes later rewrites nothing. Where none is due yet, pending says that one will be.
func blocking(conditions []condition, deviceType string, now time.Time) (_ condition, shown, pending bool) {
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

// readiness says whether the node prepares devices: it joins what the inventory knows of the hardware
// with the conditions that the rest of the driver reports.
type readiness struct {
	inv inventorySource
	// changed is called when a reported condition comes, goes or gets another code. It must not wait.
	changed func()

	mu       sync.Mutex
	reported map[string]condition // by source
	// shownUntil is when a condition last ended that was due. The inventory's need not be in it: no
	// condition that may pass is reported while the hardware is away.
	shownUntil time.Time
}

func newReadiness(inv inventorySource, changed func()) *readiness {
	return &readiness{inv: inv, changed: changed, reported: map[string]condition{}}
}

// Report sets the source's condition. It sets since.
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

// Clear ends the source's condition, if there is one.
func (r *readiness) Clear(source string) {
	r.mu.Lock()
	c, is := r.reported[source]
	if now := time.Now(); is && !now.Before(r.following(c).due()) {
		r.shownUntil = now
	}
	delete(r.reported, source)
	r.mu.Unlock()
	if is {
		r.changed()
	}
}

// Blocked says whether anything besides the hardware keeps the node from being ready.
func (r *readiness) Blocked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reported) > 0
}

// Snapshot is the inventory's, with all reported conditions as further reasons.
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

// Conditions are all that there are now, those of the hardware included.
func (r *readiness) Conditions() []condition {
	all := r.bySource() // first: what ends after this look is in it
	s := r.inv.Snapshot()
	if s.Code == "" {
		return all
	}
	c := condition{
		source: "inventory", code: s.Code, message: s.Reason,
		passing: true, types: nvidiaTypes, since: s.Since,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(all, r.following(c))
}

// following is the condition as it is to be shown. The caller holds the lock.
func (r *readiness) following(c condition) condition {
	c.follows = c.since.Before(r.shownUntil)
	return c
}

// Due says whether the slices have to show any condition now, or will have to if it stays.
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
		all = append(all, r.following(c))
	}
	slices.SortFunc(all, func(a, b condition) int { return cmp.Compare(a.source, b.source) })
	return all
}
