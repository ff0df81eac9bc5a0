package driver

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	// rolloutPoll is the first pause before the publication looks again whether the slice controller
	// has written a slice. The pause grows to rolloutPollMax, because in an API server outage of hours
	// no node must look a hundred times a second.
	rolloutPoll    = 10 * time.Millisecond
	rolloutPollMax = time.Second
	// writeTimeout is how long the rollout waits for the controller to write a slice, because the
	// controller may have nothing to write. It is longer than a write takes on a busy API server: two
	// changed slices at once would leave the pool incomplete for a moment.
	writeTimeout = 10 * time.Second
	// writeSettle is how long the controller must write nothing before the rollout takes a change of
	// several slices as done. The number of writes is not known in advance.
	writeSettle = 200 * time.Millisecond
)

// sliceRollout passes slices to the slice controller. While the wanted slices differ from the
// published ones only in taints, it changes one slice at a time.
//
// The controller then writes only that slice. If several slices differ, the controller starts a new
// pool generation, and the scheduler sees no device of the node until all slices are written.
type sliceRollout struct {
	// sent has the slices that were last passed to the controller. target has the slices that the
	// controller is to publish in the end.
	sent, target []encodedSlice
	// upcoming has the slices to pass to the controller next. It is nil if sent equals target.
	upcoming []encodedSlice
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
	// lastWrites is the controller's number of writes when the method next was last called.
	lastWrites int64
	// lastWriteAt is when the method next first saw the number lastWrites.
	lastWriteAt time.Time
}

const allSlices = -1

// newSliceRollout returns a rollout for a controller that starts with slices. published is true if
// the API server has these slices already. Then the controller may have nothing to write.
func newSliceRollout(slices []resourceslice.Slice, published bool, now time.Time) (sliceRollout, error) {
	sent, err := encodeSlices(slices)
	s := sliceRollout{sent: sent, target: sent, multipleWrites: !published, sentAt: now}
	if published {
		s.writesAtSend = -1
	}
	return s, err
}

// setTarget sets the slices that the controller is to publish in the end. They reach it over
// several calls of next.
func (s *sliceRollout) setTarget(slices []resourceslice.Slice) error {
	target, err := encodeSlices(slices)
	if err != nil {
		return err
	}
	return s.plan(s.sent, target)
}

// plan sets the fields sent and target, and computes which slices to pass to the controller next.
func (s *sliceRollout) plan(sent, target []encodedSlice) error {
	upcoming, slice, err := planStep(sent, target)
	if err != nil {
		return err
	}
	if upcoming == nil {
		target = sent // equal slices then share their memory
	}
	s.sent, s.target, s.upcoming, s.changedSlice = sent, target, upcoming, slice
	return nil
}

// pending reports whether slices are left to pass to the controller.
func (s *sliceRollout) pending() bool { return s.upcoming != nil }

// next returns the slices to pass to the controller now. ok is false if there are none, or if the
// controller has not written the previous ones. writes is the controller's number of writes.
// failing is true if its last write failed.
func (s *sliceRollout) next(writes int64, failing bool, now time.Time) (_ []resourceslice.Slice, ok bool, _ error) {
	if !s.pending() {
		return nil, false, nil
	}
	if writes != s.lastWrites {
		s.lastWrites, s.lastWriteAt = writes, now
	}
	wrote := writes > s.writesAtSend
	wroteOne := wrote && !s.multipleWrites
	settledSeveral := wrote && s.multipleWrites && now.Sub(s.lastWriteAt) >= writeSettle
	// The controller writes nothing if the API server already has the slice. Then the rollout waits
	// until the timeout.
	timedOut := !failing && now.Sub(s.sentAt) >= writeTimeout
	// A second change of the same slice has to wait, too: with two writes pending, the number of
	// writes would not tell which change is written.
	if s.changedSlice != allSlices && !wroteOne && !settledSeveral && !timedOut {
		return nil, false, nil
	}
	next, err := decodeSlices(s.upcoming)
	all := s.changedSlice == allSlices
	if err == nil {
		err = s.plan(s.upcoming, s.target)
	}
	if err != nil {
		s.upcoming = nil // try no step until the target changes
		return nil, false, err
	}
	s.multipleWrites, s.writesAtSend, s.sentAt = all, writes, now
	return next, true, nil
}

// planStep returns the slices to pass to the controller next: sent with one slice replaced, and its
// index. If more than taints differs, it returns all of target, and allSlices as the index. If sent
// equals target, it returns nil.
func planStep(sent, target []encodedSlice) (_ []encodedSlice, slice int, _ error) {
	if slices.Equal(sent, target) {
		return nil, allSlices, nil
	}
	if len(sent) != len(target) {
		return target, allSlices, nil
	}
	slice = allSlices
	for i := range target {
		if sent[i] == target[i] {
			continue
		}
		pair, err := decodeSlices([]encodedSlice{sent[i], target[i]})
		if err != nil {
			return nil, 0, err
		}
		if !apiequality.Semantic.DeepEqual(withoutTaints(pair[0]), withoutTaints(pair[1])) {
			return target, allSlices, nil
		}
		if slice == allSlices {
			slice = i
		}
	}
	upcoming := slices.Clone(sent)
	upcoming[slice] = target[slice]
	return upcoming, slice, nil
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
