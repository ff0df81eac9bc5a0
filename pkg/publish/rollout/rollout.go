// Package rollout passes a node's ResourceSlices to the slice controller, Kubernetes' own writer of
// ResourceSlices. While the wanted slices differ from the published ones only in taints, it changes
// one slice at a time.
//
// The controller then writes only that slice. If several slices differ, the controller starts a new
// pool generation, and the scheduler sees no device of the node until all slices are written.
//
// The package is pure: the caller tells it the time and how often the controller has written.
package rollout

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	// writeTimeout is how long the rollout waits for the controller to write a slice, because the
	// controller may have nothing to write. It is longer than a write takes on a busy API server: two
	// changed slices at once would leave the pool incomplete for a moment.
	writeTimeout = 10 * time.Second
	// writeSettle is how long the controller must write nothing before the rollout takes a change of
	// several slices as done. The number of writes is not known in advance.
	writeSettle = 200 * time.Millisecond
)

// Rollout has the slices that the controller got last and those that it is to publish in the end.
// It never modifies a slice, and its callers must not either.
type Rollout struct {
	sent, target []resourceslice.Slice
	// pending is true while sent differs from target. Then upcoming has the slices to pass to the
	// controller next.
	pending  bool
	upcoming []resourceslice.Slice
	// changedSlice is the index of the only slice that differs between sent and upcoming, or allSlices
	// if several or all may differ.
	changedSlice int
	// writesAtSend is the controller's number of writes at sentAt.
	writesAtSend int64
	// sentAt is when slices were last passed to the controller.
	sentAt time.Time
	// multipleWrites is true if the controller may need several writes for the slices last passed to
	// it.
	multipleWrites bool
	// lastWrites is the controller's number of writes when Next was last called.
	lastWrites int64
	// lastWriteAt is when Next first saw the number lastWrites.
	lastWriteAt time.Time
}

const allSlices = -1

// New returns a Rollout for a controller that starts with the slices. published is true if the API
// server has these slices already. Then the controller may have nothing to write.
func New(slices []resourceslice.Slice, published bool, now time.Time) *Rollout {
	r := &Rollout{sent: slices, target: slices, multipleWrites: !published, sentAt: now}
	if published {
		r.writesAtSend = -1
	}
	return r
}

// SetTarget sets the slices that the controller is to publish in the end. They reach it over
// several calls of Next.
func (r *Rollout) SetTarget(slices []resourceslice.Slice) {
	r.target = slices
	r.upcoming, r.changedSlice, r.pending = step(r.sent, r.target)
}

// Pending reports whether slices are left to pass to the controller.
func (r *Rollout) Pending() bool { return r.pending }

// Sent returns the slices that were last passed to the controller.
func (r *Rollout) Sent() []resourceslice.Slice { return r.sent }

// Next returns the slices to pass to the controller now. ok is false if there are none, or if the
// controller has not written the previous ones. writes is the controller's number of writes.
// failing is true if its last write failed.
func (r *Rollout) Next(writes int64, failing bool, now time.Time) (_ []resourceslice.Slice, ok bool) {
	if !r.pending {
		return nil, false
	}
	if writes != r.lastWrites {
		r.lastWrites, r.lastWriteAt = writes, now
	}
	wrote := writes > r.writesAtSend
	wroteOne := wrote && !r.multipleWrites
	settledSeveral := wrote && r.multipleWrites && now.Sub(r.lastWriteAt) >= writeSettle
	// The controller writes nothing if the API server already has the slice. Then the rollout waits
	// until the timeout.
	timedOut := !failing && now.Sub(r.sentAt) >= writeTimeout
	// A second change of the same slice has to wait, too: with two writes pending, the number of
	// writes would not tell which change is written.
	if r.changedSlice != allSlices && !wroteOne && !settledSeveral && !timedOut {
		return nil, false
	}
	r.multipleWrites, r.writesAtSend, r.sentAt = r.changedSlice == allSlices, writes, now
	r.sent = r.upcoming
	r.SetTarget(r.target)
	return r.sent, true
}

// step returns the slices to pass to the controller next: sent with one slice replaced, and its
// index. If more than taints differs, it returns all of target, and allSlices as the index. pending
// is false if sent equals target.
func step(sent, target []resourceslice.Slice) (upcoming []resourceslice.Slice, slice int, pending bool) {
	if len(sent) != len(target) {
		return target, allSlices, true
	}
	slice = allSlices
	for i := range target {
		switch {
		case apiequality.Semantic.DeepEqual(sent[i], target[i]):
		case !EqualExceptTaints(sent[i], target[i]):
			return target, allSlices, true
		case slice == allSlices:
			slice = i
		}
	}
	if slice == allSlices {
		return nil, allSlices, false
	}
	upcoming = slices.Clone(sent)
	upcoming[slice] = target[slice]
	return upcoming, slice, true
}

// EqualExceptTaints reports whether a and b differ at most in the taints of their devices.
func EqualExceptTaints(a, b resourceslice.Slice) bool {
	return apiequality.Semantic.DeepEqual(withoutTaints(a), withoutTaints(b))
}

// withoutTaints returns a copy of s whose devices have no taints.
func withoutTaints(s resourceslice.Slice) resourceslice.Slice {
	devices := make([]resourceapi.Device, len(s.Devices))
	for i, d := range s.Devices {
		d.Taints = nil
		devices[i] = d
	}
	s.Devices = devices
	return s
}
