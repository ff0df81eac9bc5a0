package driver

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	// stagePoll is how often is looked whether a slice has been written, stagePatience how long that is waited for where there may be nothing to write.
	stagePoll     = 10 * time.Millisecond
	stagePatience = 3 * time.Second
	// stageSettle is how long nothing must have been written after a change of several slices: nobody knows how many writes that takes.
	stageSettle = 200 * time.Millisecond
)

// stages decides what a slice controller is given of what is wanted: at most one slice that differs from what is published, as long as only taints differ.
//
// Then the controller writes that slice alone. Had it to write several, it would give the pool another generation, and until all of its slices were written
// the scheduler would see none of the node's devices.
type stages struct {
	// given is what the controller has, wanted what it is to have.
	given, wanted []resourceslice.Slice
	// differ says that these two do: hundreds of devices are not compared each time that somebody asks.
	differ bool
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
func begin(slices []resourceslice.Slice, published bool, now time.Time) stages {
	s := stages{given: slices, wanted: slices, several: !published, at: now}
	if published {
		s.writes = -1
	}
	return s
}

// want says what the controller is to have from now on.
func (s *stages) want(slices []resourceslice.Slice) {
	s.wanted = slices
	s.compare()
}

func (s *stages) compare() {
	if s.differ = !apiequality.Semantic.DeepEqual(s.given, s.wanted); !s.differ {
		s.given = s.wanted // hundreds of devices are not kept twice either
	}
}

// waiting says that something is wanted that the controller does not have yet.
func (s *stages) waiting() bool { return s.differ }

// next is what the controller is to be given now. It is false while what it was given before is to be written first, which may be failing.
func (s *stages) next(writes int64, failing bool, now time.Time) ([]resourceslice.Slice, bool) {
	if !s.waiting() {
		return nil, false
	}
	if writes != s.seen {
		s.seen, s.since = writes, now
	}
	given, slice := step(s.given, s.wanted)
	wrote := writes > s.writes
	wroteOne := wrote && !s.several
	settledSeveral := wrote && s.several && now.Sub(s.since) >= stageSettle
	// What is there already is not written: then patience has to do.
	outOfPatience := !failing && now.Sub(s.at) >= stagePatience
	// Not even the same slice is given again: of two writes nobody could say which it was that came to pass.
	if slice != allSlices && !wroteOne && !settledSeveral && !outOfPatience {
		return nil, false
	}
	s.given, s.several, s.writes, s.at = given, slice == allSlices, writes, now
	s.compare()
	return given, true
}

// step is what lies between what is given and what is wanted: the first slice that differs, or all that is wanted where more than taints differ.
func step(given, wanted []resourceslice.Slice) (_ []resourceslice.Slice, slice int) {
	if len(given) != len(wanted) {
		return wanted, allSlices
	}
	slice = allSlices
	for i := range wanted {
		if apiequality.Semantic.DeepEqual(given[i], wanted[i]) {
			continue
		}
		if !apiequality.Semantic.DeepEqual(untainted(given[i]), untainted(wanted[i])) {
			return wanted, allSlices
		}
		if slice == allSlices {
			slice = i
		}
	}
	if slice == allSlices {
		return wanted, allSlices
	}
	between := slices.Clone(given)
	between[slice] = wanted[slice]
	return between, slice
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
