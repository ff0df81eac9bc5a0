package driver

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	// stagePoll is how soon the publication first looks whether the controller has written a slice.
	// It looks ever less often, down to once in stagePollMost: an API server that is away for hours
	// would otherwise wake every node a hundred times a second.
	stagePoll     = 10 * time.Millisecond
	stagePollMost = time.Second
	// stagePatience bounds the wait for a write, because there may be nothing to write. It is longer
	// than a busy API server takes: two changed slices at once would leave the pool incomplete.
	stagePatience = 10 * time.Second
	// stageSettle is how long nothing must have been written after a change of several slices: nobody knows how many writes that takes.
	stageSettle = 200 * time.Millisecond
)

// stages decides what a slice controller is given of what is wanted: at most one slice that differs from what is published, as long as only taints differ.
//
// Then the controller writes that slice alone. Had it to write several, it would give the pool another generation, and until all of its slices were written
// the scheduler would see none of the node's devices.
type stages struct {
	// given is what the controller has, wanted what it is to have.
	given, wanted []keptSlice
	// between is what it is given next on the way from one to the other, which changes that slice, or allSlices. It is nil where they are the same.
	between []keptSlice
	slice   int
	// writes is how many there were when the controller was last given something, at when that was.
	writes int64
	at     time.Time
	// several says that what was given last may take more than one write, seen is how many writes there were at last, since then.
	several bool
	seen    int64
	since   time.Time
}

const allSlices = -1

// begin is before the controller's first write. Where everything is published already, there may be none: then nothing is waited for.
func begin(slices []resourceslice.Slice, published bool, now time.Time) (stages, error) {
	given, err := keep(slices)
	s := stages{given: given, wanted: given, several: !published, at: now}
	if published {
		s.writes = -1
	}
	return s, err
}

// want says what the controller is to have from now on.
func (s *stages) want(slices []resourceslice.Slice) error {
	wanted, err := keep(slices)
	if err != nil {
		return err
	}
	return s.goOn(s.given, wanted)
}

// goOn finds the way between the two.
func (s *stages) goOn(given, wanted []keptSlice) error {
	between, slice, err := step(given, wanted)
	if err != nil {
		return err
	}
	if between == nil {
		wanted = given // the same is not kept twice
	}
	s.given, s.wanted, s.between, s.slice = given, wanted, between, slice
	return nil
}

// waiting says that something is wanted that the controller does not have yet.
func (s *stages) waiting() bool { return s.between != nil }

// next is what the controller is to be given now. It is false while what it was given before is to be written first, which may be failing.
func (s *stages) next(writes int64, failing bool, now time.Time) (_ []resourceslice.Slice, ok bool, _ error) {
	if !s.waiting() {
		return nil, false, nil
	}
	if writes != s.seen {
		s.seen, s.since = writes, now
	}
	wrote := writes > s.writes
	wroteOne := wrote && !s.several
	settledSeveral := wrote && s.several && now.Sub(s.since) >= stageSettle
	// What is there already is not written: then patience has to do.
	outOfPatience := !failing && now.Sub(s.at) >= stagePatience
	// Not even the same slice is given again: of two writes nobody could say which it was that came to pass.
	if s.slice != allSlices && !wroteOne && !settledSeveral && !outOfPatience {
		return nil, false, nil
	}
	next, err := unkeep(s.between)
	several := s.slice == allSlices
	if err == nil {
		err = s.goOn(s.between, s.wanted)
	}
	if err != nil {
		s.between = nil // not before something else is wanted
		return nil, false, err
	}
	s.several, s.writes, s.at = several, writes, now
	return next, true, nil
}

// step is what lies between what is given and what is wanted: the first slice that differs, or all that is wanted where more than taints differ; nil where
// nothing does.
func step(given, wanted []keptSlice) (_ []keptSlice, slice int, _ error) {
	if slices.Equal(given, wanted) {
		return nil, allSlices, nil
	}
	if len(given) != len(wanted) {
		return wanted, allSlices, nil
	}
	slice = allSlices
	for i := range wanted {
		if given[i] == wanted[i] {
			continue
		}
		two, err := unkeep([]keptSlice{given[i], wanted[i]})
		if err != nil {
			return nil, 0, err
		}
		if !apiequality.Semantic.DeepEqual(untainted(two[0]), untainted(two[1])) {
			return wanted, allSlices, nil
		}
		if slice == allSlices {
			slice = i
		}
	}
	between := slices.Clone(given)
	between[slice] = wanted[slice]
	return between, slice, nil
}

// untainted is a slice without the taints of its devices.
func untainted(s resourceslice.Slice) resourceslice.Slice {
	devices := make([]resourceapi.Device, len(s.Devices))
	for i, d := range s.Devices {
		d.Taints = nil
		devices[i] = d
	}
	s.Devices = devices
	return s
}
