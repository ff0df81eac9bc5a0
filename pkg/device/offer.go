package device

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Offer returns all devices that the GPUs are offered as, in publishing order. The scheduler takes
// the first device that fits, so this order decides what it picks and how much work that takes:
//
//   - Whole GPUs come first, by PCI address, then those for virtual machines, then shares. So a
//     claim for a whole GPU skips all partitions.
//   - Existing partitions of any GPU come next, so that the partitions of an admin are used before
//     the plugin partitions another GPU.
//   - Placements come last, GPU by GPU, small partitions first, so that one GPU fills up before
//     the next. They begin with the last GPU, because claims for whole GPUs take the first ones.
//     The scheduler evaluates a claim's expressions for each placement of a full GPU, too.
//
// The shares of a partition follow that partition. The offerings must include all GPUs of the node:
// share rules may select a GPU by its index, and if one GPU needs counters, all GPUs get them. The
// Cluster Autoscaler ignores a GPU without counters on a node where other GPUs have counters
// (kubernetes/autoscaler, cluster-autoscaler/simulator/dynamicresources/utils/utilization.go).
func Offer(offerings []Offering) []Shape {
	sorted := byPCIAddress(offerings)
	gpus := make([]gpuShapes, len(sorted))
	overlap := false
	for index, o := range sorted {
		gpus[index] = o.gpuShapes(index)
		overlap = overlap || gpus[index].overlaps
	}
	var whole, vfio, shares, existing, placements []Shape
	for _, c := range gpus {
		if !overlap && !c.held {
			c.dropCounters()
		}
		whole, vfio, shares = append(whole, c.whole...), append(vfio, c.vfio...), append(shares, c.shares...)
		existing, placements = append(c.existing, existing...), append(c.placements, placements...)
	}
	return slices.Concat(whole, vfio, shares, existing, placements)
}

func byPCIAddress(offerings []Offering) []Offering {
	sorted := slices.Clone(offerings)
	slices.SortFunc(sorted, func(a, b Offering) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return sorted
}

// gpuShapes has the devices that one GPU is offered as. A partition comes directly before its share
// device. The field existing also has partitions that are published only because claims have them.
type gpuShapes struct {
	whole, vfio, shares, existing, placements []Shape
	// overlaps is true if devices of this GPU may overlap. Then the devices of all GPUs of the node
	// need counters. held is true if claims have devices of this GPU that were published with
	// counters.
	overlaps, held bool
}

// gpuShapes returns the devices that the GPU is offered as. index is the GPU's index on the node.
// All these devices consume counters, except those that were published without counters when a
// claim got them.
func (o Offering) gpuShapes(index int) gpuShapes {
	set := counterSetOf(o.GPU)
	held := o.holdings(set)
	o.Placements = o.Placements && set.hasMemorySlices()
	c := gpuShapes{overlaps: o.Placements || o.Counted || o.Whole && o.VFIO}
	for _, h := range held {
		c.held = c.held || h.counted
		// If a claim has the whole GPU, the GPU has no room for other devices, so the other GPUs need no
		// counters.
		c.overlaps = c.overlaps || h.counted && h.Partition != nil
	}
	if slices.ContainsFunc(held, holding.hiddenFromCounters) {
		o.Whole, o.VFIO, o.Placements = false, false, false
	}
	vfio := VFIO{o.GPU, counts{set, maps.Clone(set)}}
	if counted, held := o.Held[vfio.Name()]; held && !counted {
		c.vfio = []Shape{withoutCounters(vfio)}
	} else if held || o.VFIO {
		c.vfio = []Shape{vfio}
	}
	for _, s := range o.shapes(Whole{o.GPU, counts{set, maps.Clone(set)}}, "", o.Whole, index) {
		if _, share := s.(Shared); share {
			c.shares = append(c.shares, s)
		} else {
			c.whole = append(c.whole, s)
		}
	}
	existing, kept, placements := o.partitions(held, set)
	for _, partitions := range [][]Partition{existing, kept, placements} {
		ownCounters(set, partitions)
	}
	for _, p := range existing {
		if !conflictsWithHeld(p, held) {
			c.existing = append(c.existing, o.shapes(p, p.profile, true, index)...)
		}
	}
	for _, p := range kept {
		c.existing = append(c.existing, o.shapes(p, p.profile, false, index)...)
	}
	for _, p := range placements {
		c.placements = append(c.placements, o.shapes(p, p.profile, true, index)...)
	}
	isShare := func(s Shape) bool { _, is := s.(Shared); return is }
	c.overlaps = c.overlaps || len(c.shares) > 0 || slices.ContainsFunc(c.existing, isShare)
	return c
}

// partitions returns the GPU's partitions. existing are the MIG devices that are offered. kept are
// partitions that are published only because claims have them or shares of them. free are
// placements where MIG instances can be created.
func (o Offering) partitions(held []holding, set budget) (existing, kept, free []Partition) {
	for _, i := range o.Instances {
		existing = append(existing, migDevices(o.GPU, i, set)...)
	}
	if o.Placements {
		free = placementsOf(o.GPU, o.Profiles, set)
	}
	for _, h := range held {
		is := func(p Partition) bool { return p.Name() == h.Unshared().String() }
		if h.known && !slices.ContainsFunc(existing, is) && !slices.ContainsFunc(free, is) && !slices.ContainsFunc(kept, is) {
			kept = append(kept, h.partition)
		}
	}
	return existing, kept, free
}

// A partition that consumes some counter already excludes its own shares. ownCounters adds a
// counter to every other partition, such as one of several compute instances, so that it excludes
// its shares too. No counter is added beyond the API's limit.
func ownCounters(set budget, partitions []Partition) {
	for i := range partitions {
		p := &partitions[i]
		p.set = set
		if !p.exclusive() && len(set) < resourceapi.ResourceSliceMaxCountersPerCounterSet {
			set[p.ownCounter()], p.cost[p.ownCounter()] = 1, 1
		}
	}
}

// conflictsWithHeld reports whether a claim has a device that overlaps the partition p, and no
// counter keeps the scheduler from allocating p.
func conflictsWithHeld(p Partition, held []holding) bool {
	return slices.ContainsFunc(held, func(h holding) bool {
		return (h.hiddenFromCounters() || !p.cost.hasMemorySlices()) &&
			h.Unshared().String() != p.Name() && Conflict(h.Name, p.name(), p.gpu)
	})
}

// shapes returns the device s and its share device. It omits s if it is not offered and no claim
// has it, and the share device if it is not offered and no claim has a share.
func (o Offering) shapes(s shareable, profile string, offered bool, index int) []Shape {
	counted, held := o.Held[s.Name()]
	if held && !counted {
		return []Shape{withoutCounters(s)}
	}
	var all []Shape
	if offered || held {
		all = append(all, s)
	}
	if shared := (Shared{s, o.share(s, profile, offered, index)}); shared.possible() {
		all = append(all, shared)
	}
	return all
}

// share returns how the device s is shared. index is the index of the GPU on the node. offered is
// false if s is not offered. If claims have shares of a kind that is no longer offered, share
// returns that kind as withdrawn.
func (o Offering) share(s shareable, profile string, offered bool, index int) Share {
	share := o.Shares.For(o.GPU, profile, index)
	if !offered || share.Fractions && o.FractionsUnsupported != "" {
		share = Share{}
	}
	name := s.name()
	name.Share = true
	if fractions, held := o.HeldShares[name.String()]; held && (!share.Offered() || share.Fractions != fractions) {
		return Share{Fractions: fractions, withdrawn: true}
	}
	return share
}

// dropCounters makes whole GPUs and existing partitions consume no counters. Callers use it on
// nodes where no devices overlap.
func (c gpuShapes) dropCounters() {
	for _, shapes := range [][]Shape{c.whole, c.vfio, c.existing} {
		for i, s := range shapes {
			shapes[i] = withoutCounters(s)
		}
	}
}

func withoutCounters(s Shape) Shape {
	switch s := s.(type) {
	case Whole:
		return Whole{gpu: s.gpu}
	case VFIO:
		return VFIO{gpu: s.gpu}
	case Partition:
		s.counts = counts{}
		return s
	default:
		return s
	}
}

// holding is a device of the GPU that a claim has alone or of which claims have shares.
type holding struct {
	Name
	// counted is true if the device is published with counters. Share devices always are.
	counted bool
	// partition is the partition that the embedded Name names. known is true if the GPU has this
	// partition or can have it. Otherwise partition is not set.
	partition Partition
	known     bool
}

// hiddenFromCounters reports whether a claim has the device, but the device takes nothing from the
// GPU's published counters. Then no overlapping device may be offered, because the scheduler would
// allocate it, too.
func (h holding) hiddenFromCounters() bool { return !h.counted || h.Partition != nil && !h.known }

func (o Offering) holdings(set budget) []holding {
	var all []holding
	add := func(name string, counted bool) {
		n, ok := ParseName(name)
		if !ok || n.GPU != o.WholeName() {
			return
		}
		h := holding{Name: n, counted: counted}
		if n.Partition != nil {
			h.partition, h.known = o.partition(*n.Partition, set)
		}
		all = append(all, h)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Held)) {
		add(name, o.Held[name])
	}
	for _, name := range slices.Sorted(maps.Keys(o.HeldShares)) {
		add(name, true)
	}
	return all
}

// FractionRefusals returns why GPUs are not offered in shares with limits by MPS although the share
// rules ask for that. The keys are the names of these GPUs.
func FractionRefusals(offerings []Offering) map[string]string {
	why := map[string]string{}
	for index, o := range byPCIAddress(offerings) {
		for _, rule := range o.Shares.rules {
			if o.FractionsUnsupported != "" && rule.share.Fractions && (rule.index == index || rule.index < 0 && rule.selector.matches(o.GPU)) {
				why[o.WholeName()] = o.FractionsUnsupported
			}
		}
	}
	return why
}
