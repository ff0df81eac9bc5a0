package device

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// budget is what a GPU has for its partitions, and so what keeps them apart: a number of each of several units. Its names are those of counters.
type budget map[string]uint32

// engineCounters are the units of which a GPU has several and a partition takes some. Multiprocessors are not among them: they are bound to memory slices,
// and those of all profiles do not add up to what the card has.
var engineCounters = map[string]func(Engines) uint32{
	"copy-engines": func(e Engines) uint32 { return e.CopyEngines },
	"decoders":     func(e Engines) uint32 { return e.Decoders },
	"encoders":     func(e Engines) uint32 { return e.Encoders },
	"jpeg-engines": func(e Engines) uint32 { return e.JPEGEngines },
	"ofa-engines":  func(e Engines) uint32 { return e.OFAEngines },
}

// A partition takes all of each memory slice that it lies on, the whole GPU half of every one. So the whole excludes every partition, and still there is
// enough left for a second time: a scheduler asks for a device's counters once more when a claim with admin access is to look at it
// (https://github.com/kubernetes/kubernetes/issues/140729).
const (
	sliceTotal     = 2
	ofEachForWhole = 1
)

func memorySlice(n uint32) string { return fmt.Sprintf("memory-slice-%d", n) }

// Where nothing overlaps but shares, a device and its shares have a counter of their own. The device takes half of it, for the reason above.
const (
	deviceTotal   = sliceTotal
	ofOwnForAlone = ofEachForWhole
	wholeCounter  = "whole"
)

func ownCounter(profile uint32) string { return fmt.Sprintf("profile-%d", profile) }

// budgetOf is nil for a card that cannot be cut, or that cannot be described: the API allows a set no more than 32 counters.
//
// Memory slices are counted by position, since a placement takes certain ones. An engine is counted where placements that lie side by side could take more
// of it than the card has, and a profile gets a counter of its own where more of its instances would fit side by side than the card allows. What could
// decide nothing is left out: the scheduler goes through every counter of a node for every device that it tries.
func budgetOf(m *MIG) budget {
	if m == nil {
		return nil
	}
	b := budget{}
	width := uint32(0)
	for _, p := range m.Profiles {
		for _, start := range p.Starts {
			if p.Size > maxMemorySlices || start > maxMemorySlices-p.Size {
				return nil
			}
			width = max(width, start+p.Size)
		}
	}
	for n := range width {
		b[memorySlice(n)] = sliceTotal
	}
	for name, of := range engineCounters {
		// What the card has of an engine is told nowhere. It is at least what the instances of one profile have together.
		total := uint32(0)
		for _, p := range m.Profiles {
			side := min(p.MaxInstances, mostSideBySide(m.Profiles, func(o Profile) uint32 { return one(o.ID == p.ID) }))
			total = max(total, side*of(p.Engines))
		}
		if mostSideBySide(m.Profiles, func(p Profile) uint32 { return of(p.Engines) }) > total {
			b[name] = total
		}
	}
	for _, p := range m.Profiles {
		if p.MaxInstances < b.mostOf(p, m.Profiles) {
			b[ownCounter(p.ID)] = p.MaxInstances
		}
	}
	if len(b) == 0 || len(b) > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil
	}
	return b
}

// maxMemorySlices is far beyond what any card has, and keeps numbers that make no sense from being added up.
const maxMemorySlices = resourceapi.ResourceSliceMaxCountersPerCounterSet

func one(is bool) uint32 {
	if is {
		return 1
	}
	return 0
}

// mostSideBySide is the largest sum of weights of placements that do not overlap.
func mostSideBySide(profiles []Profile, weight func(Profile) uint32) uint32 {
	// most[n] is the largest sum within the first n memory slices.
	var most [maxMemorySlices + 1]uint32
	for n := uint32(1); n <= maxMemorySlices; n++ {
		most[n] = most[n-1]
		for _, p := range profiles {
			if p.Size > 0 && p.Size <= n && slices.Contains(p.Starts, n-p.Size) {
				most[n] = max(most[n], most[n-p.Size]+weight(p))
			}
		}
	}
	return most[maxMemorySlices]
}

// mostOf is how many instances of one profile the budget allows side by side.
func (b budget) mostOf(p Profile, profiles []Profile) uint32 {
	most := mostSideBySide(profiles, func(o Profile) uint32 { return one(o.ID == p.ID) })
	for name, of := range engineCounters {
		if total, counted := b[name]; counted && of(p.Engines) > 0 {
			most = min(most, total/of(p.Engines))
		}
	}
	return most
}

// cost is what an instance takes of the budget.
func (b budget) cost(p Profile, at Placement) budget {
	c := budget{}
	for n := at.Start; n < at.Start+at.Size; n++ {
		c[memorySlice(n)] = sliceTotal
	}
	for name, of := range engineCounters {
		if _, counted := b[name]; counted && of(p.Engines) > 0 {
			c[name] = of(p.Engines)
		}
	}
	if _, counted := b[ownCounter(p.ID)]; counted {
		c[ownCounter(p.ID)] = 1
	}
	return c
}

// whole is what the GPU as a whole takes of the budget. Every partition needs a memory slice: so these are enough.
func (b budget) whole() budget {
	if b == nil {
		return nil
	}
	c := b.alone(wholeCounter)
	for n := uint32(0); b[memorySlice(n)] > 0; n++ {
		c[memorySlice(n)] = ofEachForWhole
	}
	return c
}

// alone is what a device takes of a counter that only its shares use besides, if there is one.
func (b budget) alone(counter string) budget {
	c := budget{}
	if b[counter] > 0 {
		c[counter] = ofOwnForAlone
	}
	return c
}

// all of what is taken a part of.
func (b budget) all(of budget) budget {
	c := budget{}
	for name := range of {
		c[name] = b[name]
	}
	return c
}

// holds says whether both fit together.
func (b budget) holds(x, y budget) bool {
	for name, total := range b {
		if x[name]+y[name] > total {
			return false
		}
	}
	return true
}

func (b budget) counters() map[string]resourceapi.Counter {
	counters := make(map[string]resourceapi.Counter, len(b))
	for name, n := range b {
		counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
	}
	return counters
}

// consumed is what a device takes from its GPU's counter set. Nothing is taken where nothing is counted.
func (b budget) consumed(set string) []resourceapi.DeviceCounterConsumption {
	if len(b) == 0 {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: b.counters()}}
}

// Conflict says whether two claims cannot hold both devices of a GPU at once. Shares of one device can be held by many, and with everything else they are as
// their device. Where the card's profiles are not known, it takes partitions at different places for compatible: they were allocated by someone who knew them.
func Conflict(a, b Name, g GPU) bool {
	if a.GPU != b.GPU || a.Share && b.Share && a.String() == b.String() {
		return false
	}
	if a.Partition == nil || b.Partition == nil {
		return true
	}
	x, y := *a.Partition, *b.Partition
	if x.ProfileID == y.ProfileID && x.Start == y.Start {
		return x.Compute == nil || y.Compute == nil || *x.Compute == *y.Compute
	}
	p, known := g.Profile(x.ProfileID)
	q, too := g.Profile(y.ProfileID)
	if !known || !too {
		return x.Start == y.Start
	}
	at, beside := Placement{x.Start, p.Size}, Placement{y.Start, q.Size}
	if at.Overlaps(beside) {
		return true
	}
	all := budgetOf(g.MIG)
	return all != nil && !all.holds(all.cost(p, at), all.cost(q, beside))
}
