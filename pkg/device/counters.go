package device

import (
	"fmt"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// budget is what a GPU has for its devices, and so what keeps them apart: a number of each of
// several units. Its names are those of counters.
type budget map[string]int64

// engineCounters are the units of which a GPU has several and a partition takes some. Multiprocessors are not among them: they are bound to memory slices,
// and those of all profiles do not add up to what the card has.
var engineCounters = map[string]func(Engines) uint32{
	"copy-engines": func(e Engines) uint32 { return e.CopyEngines },
	"decoders":     func(e Engines) uint32 { return e.Decoders },
	"encoders":     func(e Engines) uint32 { return e.Encoders },
	"jpeg-engines": func(e Engines) uint32 { return e.JPEGEngines },
	"ofa-engines":  func(e Engines) uint32 { return e.OFAEngines },
}

const (
	// memoryCounter is in bytes. It decides nothing: it is there for those who add up what a node
	// has and what of it is used.
	memoryCounter = "memory"
	// wholeCounter is all that a GPU has of which nothing else is known.
	wholeCounter = "whole"

	slicePrefix = "memory-slice-"
)

func memorySlice(n uint32) string { return fmt.Sprint(slicePrefix, n) }

func ownCounter(profile uint32) string { return fmt.Sprintf("profile-%d", profile) }

// setOf is the counter set of a GPU, which follows from its model alone. A GPU that cannot be cut,
// or not be described, has one counter.
func setOf(g GPU) budget {
	if b := budgetOf(g); b != nil {
		return b
	}
	if n := memoryOf(g); n > 0 {
		return budget{memoryCounter: n}
	}
	return budget{wholeCounter: 1}
}

// budgetOf is nil for a card that cannot be cut, or that cannot be described: the API allows a set no more than 32 counters.
//
// Memory slices are counted by position, since a placement takes certain ones. An engine is counted
// where placements that lie side by side could take more of it than the card has, and a profile
// gets a counter of its own where more of its instances would fit side by side than the card
// allows. What could decide nothing is left out, but for the memory: the scheduler goes through
// every counter of a node for every device that it tries.
func budgetOf(g GPU) budget {
	m := g.MIG
	if m == nil || len(m.Profiles) == 0 {
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
		b[memorySlice(n)] = 1
	}
	for name, of := range engineCounters {
		// What the card has of an engine is told nowhere. It is at least what the instances of one profile have together.
		total := int64(0)
		for _, p := range m.Profiles {
			side := min(int64(p.MaxInstances), mostSideBySide(m.Profiles, func(o Profile) int64 { return one(o.ID == p.ID) }))
			total = max(total, side*int64(of(p.Engines)))
		}
		if mostSideBySide(m.Profiles, func(p Profile) int64 { return int64(of(p.Engines)) }) > total {
			b[name] = total
		}
	}
	for _, p := range m.Profiles {
		if int64(p.MaxInstances) < b.mostOf(p, m.Profiles) {
			b[ownCounter(p.ID)] = int64(p.MaxInstances)
		}
	}
	if len(b) == 0 {
		return nil
	}
	if n := memoryOf(g); n > 0 {
		b[memoryCounter] = n
	}
	if len(b) > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil
	}
	return b
}

// memoryOf is what a GPU has, and never less than what its partitions have side by side: NVML
// counts both in its own way.
func memoryOf(g GPU) int64 {
	n := int64(min(g.MemoryBytes, math.MaxInt64))
	if g.MIG == nil {
		return n
	}
	return max(n, mostSideBySide(g.MIG.Profiles, Profile.memory))
}

// memory is bounded, so that no sum of partitions overflows.
func (p Profile) memory() int64 { return int64(min(p.MemoryBytes, math.MaxInt64/maxMemorySlices)) }

// maxMemorySlices is far beyond what any card has, and keeps numbers that make no sense from being added up.
const maxMemorySlices = resourceapi.ResourceSliceMaxCountersPerCounterSet

func one(is bool) int64 {
	if is {
		return 1
	}
	return 0
}

// mostSideBySide is the largest sum of weights of placements that do not overlap.
func mostSideBySide(profiles []Profile, weight func(Profile) int64) int64 {
	// most[n] is the largest sum within the first n memory slices.
	var most [maxMemorySlices + 1]int64
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
func (b budget) mostOf(p Profile, profiles []Profile) int64 {
	most := mostSideBySide(profiles, func(o Profile) int64 { return one(o.ID == p.ID) })
	for name, of := range engineCounters {
		if total, counted := b[name]; counted && of(p.Engines) > 0 {
			most = min(most, total/int64(of(p.Engines)))
		}
	}
	return most
}

// cost is what an instance takes of the budget.
func (b budget) cost(p Profile, at Placement) budget {
	c := budget{}
	take := func(name string, n int64) {
		if _, counted := b[name]; counted && n > 0 {
			c[name] = n
		}
	}
	for n := range uint32(maxMemorySlices) {
		take(memorySlice(n), one(at.Overlaps(Placement{n, 1})))
	}
	for name, of := range engineCounters {
		take(name, int64(of(p.Engines)))
	}
	take(memoryCounter, min(p.memory(), b[memoryCounter]))
	take(ownCounter(p.ID), 1)
	return c
}

// costOfPart is what a compute instance takes that is less than its GPU instance: its part of the
// memory.
func (b budget) costOfPart(p Profile, compute ComputeInstance) budget {
	all := int64(max(p.Slices, 1))
	n := p.memory() / all * min(int64(max(compute.Placement.Size, 1)), all)
	if b[memoryCounter] == 0 || n == 0 {
		return budget{}
	}
	return budget{memoryCounter: min(n, b[memoryCounter])}
}

// placed says whether the budget has memory slices, by which partitions exclude each other.
func (b budget) placed() bool {
	for name := range b {
		if strings.HasPrefix(name, slicePrefix) {
			return true
		}
	}
	return false
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
		format := resource.DecimalSI
		if name == memoryCounter {
			format = resource.BinarySI
		}
		counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(n, format)}
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
	all := budgetOf(g)
	return all != nil && !all.holds(all.cost(p, at), all.cost(q, beside))
}
