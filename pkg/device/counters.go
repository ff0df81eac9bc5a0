package device

import (
	"fmt"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// MemorySlicePrefix begins the names of the counters of memory slices. The slice's number follows.
const MemorySlicePrefix = "memory-slice-"

// budget maps the names of counters to amounts: what a GPU has in total, or what one device takes
// of that total.
type budget map[string]int64

// engineCounters maps the name of each engine counter to the function that reads that number of
// engines. Multiprocessors have no counter, because they belong to memory slices.
var engineCounters = map[string]func(Engines) uint32{
	"copy-engines": func(e Engines) uint32 { return e.CopyEngines },
	"decoders":     func(e Engines) uint32 { return e.Decoders },
	"encoders":     func(e Engines) uint32 { return e.Encoders },
	"jpeg-engines": func(e Engines) uint32 { return e.JPEGEngines },
	"ofa-engines":  func(e Engines) uint32 { return e.OFAEngines },
}

const (
	// memoryCounter is the name of the counter for memory, in bytes. This counter never limits an
	// allocation. It lets tools add up a node's memory and how much of it is used.
	memoryCounter = "memory"
	// wholeCounter is the name of the counter for the whole GPU. It is used only for a GPU with no
	// usable MIG profiles and unknown memory.
	wholeCounter = "whole"
)

func memorySlice(n uint32) string { return fmt.Sprint(MemorySlicePrefix, n) }

func profileCounter(profile uint32) string { return fmt.Sprintf("profile-%d", profile) }

// counterSetOf returns the counters of a GPU and their totals. They depend only on the GPU's model.
// A GPU without usable MIG profiles has a single counter.
func counterSetOf(g GPU) budget {
	if b := migBudget(g); b != nil {
		return b
	}
	if n := totalMemory(g); n > 0 {
		return budget{memoryCounter: n}
	}
	return budget{wholeCounter: 1}
}

// migBudget returns the counters for the partitions of a GPU. It returns nil if the GPU has no MIG,
// or needs more counters than a counter set may have. It leaves out counters that restrict nothing,
// except memory, because the scheduler checks every counter of a node for every device that it
// tries.
func migBudget(g GPU) budget {
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
	// Each memory slice has its own counter, because a placement takes certain memory slices.
	for n := range width {
		b[memorySlice(n)] = 1
	}
	for name, of := range engineCounters {
		// NVML does not report how many engines of a kind a card has, so the number is computed: the
		// largest number that all instances of one profile have together.
		total := int64(0)
		for _, p := range m.Profiles {
			side := min(int64(p.MaxInstances), maxWithoutOverlap(m.Profiles, func(o Profile) int64 { return boolToInt(o.ID == p.ID) }))
			total = max(total, side*int64(of(p.Engines)))
		}
		// A kind of engine gets a counter only if placements that do not overlap could together need more
		// of these engines than the card has.
		if maxWithoutOverlap(m.Profiles, func(p Profile) int64 { return int64(of(p.Engines)) }) > total {
			b[name] = total
		}
	}
	// A profile gets a counter of its own if the other counters would allow more of its instances at
	// once than the card does.
	for _, p := range m.Profiles {
		if int64(p.MaxInstances) < b.maxInstances(p, m.Profiles) {
			b[profileCounter(p.ID)] = int64(p.MaxInstances)
		}
	}
	if len(b) == 0 {
		return nil
	}
	if n := totalMemory(g); n > 0 {
		b[memoryCounter] = n
	}
	if len(b) > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil
	}
	return b
}

// totalMemory returns the GPU's memory in bytes. If the partitions that fit on the GPU together
// have more, it returns the sum of their memory, so that the memory counter allows all of them.
func totalMemory(g GPU) int64 {
	n := int64(min(g.MemoryBytes, math.MaxInt64))
	if g.MIG == nil {
		return n
	}
	return max(n, maxWithoutOverlap(g.MIG.Profiles, Profile.memory))
}

// memory returns the profile's memory in bytes. It caps the value, so that adding up partitions
// never overflows an int64.
func (p Profile) memory() int64 { return int64(min(p.MemoryBytes, math.MaxInt64/maxMemorySlices)) }

// maxMemorySlices is a limit that is higher than the number of memory slices of any known card. If
// a profile needs more, the GPU gets no counters for partitions, because its MIG data is
// nonsensical.
const maxMemorySlices = resourceapi.ResourceSliceMaxCountersPerCounterSet

func boolToInt(is bool) int64 {
	if is {
		return 1
	}
	return 0
}

// maxWithoutOverlap returns the largest sum of weights that placements without overlap can have.
func maxWithoutOverlap(profiles []Profile, weight func(Profile) int64) int64 {
	// most[n] is the largest sum of weights within the first n memory slices.
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

// maxInstances returns how many instances of the profile p can exist at the same time, according to
// the placements of the profile and the engine counters in b.
func (b budget) maxInstances(p Profile, profiles []Profile) int64 {
	most := maxWithoutOverlap(profiles, func(o Profile) int64 { return boolToInt(o.ID == p.ID) })
	for name, of := range engineCounters {
		if total, counted := b[name]; counted && of(p.Engines) > 0 {
			most = min(most, total/int64(of(p.Engines)))
		}
	}
	return most
}

// cost returns what a MIG instance of the profile p at the placement "at" takes of the counters in
// b.
func (b budget) cost(p Profile, at Placement) budget {
	c := budget{}
	take := func(name string, n int64) {
		if _, counted := b[name]; counted && n > 0 {
			c[name] = n
		}
	}
	for n := range uint32(maxMemorySlices) {
		take(memorySlice(n), boolToInt(at.Overlaps(Placement{n, 1})))
	}
	for name, of := range engineCounters {
		take(name, int64(of(p.Engines)))
	}
	take(memoryCounter, min(p.memory(), b[memoryCounter]))
	take(profileCounter(p.ID), 1)
	return c
}

// computeInstanceCost returns what a compute instance takes of the counters in b if it is smaller
// than its GPU instance. That is only a part of the memory.
func (b budget) computeInstanceCost(p Profile, compute ComputeInstance) budget {
	all := int64(max(p.Slices, 1))
	n := p.memory() / all * min(int64(max(compute.Placement.Size, 1)), all)
	if b[memoryCounter] == 0 || n == 0 {
		return budget{}
	}
	return budget{memoryCounter: min(n, b[memoryCounter])}
}

// hasMemorySlices reports whether b has counters for memory slices, which keep overlapping
// partitions apart.
func (b budget) hasMemorySlices() bool {
	for name := range b {
		if strings.HasPrefix(name, MemorySlicePrefix) {
			return true
		}
	}
	return false
}

// fits reports whether two devices, which cost x and y, together consume no more than the counters
// in b have.
func (b budget) fits(x, y budget) bool {
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

// consumed returns b as what a device consumes from the counter set with the name in set. It
// returns nil if b is empty.
func (b budget) consumed(set string) []resourceapi.DeviceCounterConsumption {
	if len(b) == 0 {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: b.counters()}}
}

// Conflict reports whether the GPU g cannot hold both devices a and b, because they overlap or need
// too many engines or instances. Shares of one device do not conflict; otherwise a share counts as
// its device. If a profile is unknown, only the first memory slices are compared.
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
	q, otherKnown := g.Profile(y.ProfileID)
	if !known || !otherKnown {
		return x.Start == y.Start
	}
	at, other := Placement{x.Start, p.Size}, Placement{y.Start, q.Size}
	if at.Overlaps(other) {
		return true
	}
	all := migBudget(g)
	return all != nil && !all.fits(all.cost(p, at), all.cost(q, other))
}
