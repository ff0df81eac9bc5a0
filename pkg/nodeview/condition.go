package nodeview

import (
	"slices"
	"strings"
	"time"
)

// transientGrace is how long a transient condition must last before the slices show it. Without
// this grace, a driver reload or a disk that is full for a moment would rewrite every slice twice.
const transientGrace = 30 * time.Second

// NVIDIATypes are the device types that cannot be prepared without NVIDIA's driver, as in the
// attribute "type".
var NVIDIATypes = []string{"gpu", "mig"}

// Condition is one reason why the node refuses to prepare devices.
type Condition struct {
	// Source names the part of the driver that reports the condition. Each source has at most one
	// condition.
	Source string
	// Code is the condition's value in taints, for programs. docs/operations.md lists all codes, which
	// are constants in the files of their sources. Message is for people.
	Code, Message string
	// Transient means that the condition may end without an admin's help.
	Transient bool
	// Types are the device types that the condition affects, as in the attribute "type" without
	// "-share". Nil means all.
	Types []string
	// Since is when the source began to report a condition. It does not change when the source
	// replaces one condition by another.
	Since time.Time
	// shownAtOnce means that the condition began while the slices showed another one, so it has no
	// transientGrace. Otherwise Pods could be scheduled to the node in the gap between the two taints.
	shownAtOnce bool
}

// due returns when the slices must show the condition.
func (c Condition) due() time.Time {
	if c.Transient && !c.shownAtOnce {
		return c.Since.Add(transientGrace)
	}
	return c.Since
}

func (c Condition) affects(deviceType string) bool {
	return c.Types == nil || slices.Contains(c.Types, strings.TrimSuffix(deviceType, "-share"))
}

// ShownCondition returns the condition that the slices show for the device type: the one that is
// due first, so that a later condition rewrites no slice. shown is true if that condition is due at
// the time now, pending if it is due later. Without a condition both are false.
func ShownCondition(
	conditions []Condition, deviceType string, now time.Time,
) (_ Condition, shown, pending bool) {
	var first *Condition
	for i, c := range conditions {
		if c.affects(deviceType) && (first == nil || c.due().Before(first.due())) {
			first = &conditions[i]
		}
	}
	switch {
	case first == nil:
		return Condition{}, false, false
	case now.Before(first.due()):
		return Condition{}, false, true
	default:
		return *first, true, false
	}
}
