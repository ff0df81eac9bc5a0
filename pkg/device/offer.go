package device

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Offer lists every shape of the GPUs, in publishing order. Allocation is first-fit, so this order
// is a cost, and a choice:
//
//   - Whole GPUs come first, by PCI address, so that a claim for one does not go through the partitions of all. Their shares follow.
//   - Partitions that exist come before places of any GPU: what an admin cut is used before another GPU is.
//   - Places come last, one GPU after the other with its small partitions first, so that a GPU is filled before the next is begun. They begin with the last
//     GPU: a scheduler evaluates the expressions of a claim for each partition of a GPU that somebody has whole before it goes on to the next.
//
// Shares of a partition follow it. The GPUs are all that the node has: share rules may count them,
// and if one needs counters, the devices of all are counted. The Cluster Autoscaler takes no notice
// of a GPU without counters beside one with them
// (https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/simulator/dynamicresources/utils/utilization.go).
func Offer(offerings []Offering) []Shape {
	sorted := byPlace(offerings)
	cards := make([]card, len(sorted))
	overlap := false
	for index, o := range sorted {
		cards[index] = o.card(index)
		overlap = overlap || cards[index].overlaps
	}
	var whole, shares, existing, places []Shape
	for _, c := range cards {
		if !overlap && !c.held {
			c.uncount()
		}
		whole, shares = append(whole, c.whole...), append(shares, c.shares...)
		existing, places = append(c.existing, existing...), append(c.places, places...)
	}
	return slices.Concat(whole, shares, existing, places)
}

func byPlace(offerings []Offering) []Offering {
	sorted := slices.Clone(offerings)
	slices.SortFunc(sorted, func(a, b Offering) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return sorted
}

// card is what is offered of one GPU: the whole and its shares, partitions that exist or are held,
// and places, each before its shares.
type card struct {
	whole, shares, existing, places []Shape
	// overlaps says that all GPUs of the node need counters, held that this one does for what
	// claims hold.
	overlaps, held bool
}

// card has the shapes of the GPU at a place among the node's. All are counted, except those that
// are held and were not.
func (o Offering) card(index int) card {
	set := setOf(o.GPU)
	held := o.holdings(set)
	o.Placements = o.Placements && set.placed()
	c := card{overlaps: o.Placements || o.Counted}
	for _, h := range held {
		c.held = c.held || h.counted
		c.overlaps = c.overlaps || h.counted && h.Partition != nil // a whole GPU that is held is all used: it forces nobody
	}
	if slices.ContainsFunc(held, holding.untold) {
		o.Whole, o.Placements = false, false
	}
	for _, s := range o.shapes(Whole{o.GPU, counts{set, maps.Clone(set)}}, "", o.Whole, index) {
		if _, share := s.(Shared); share {
			c.shares = append(c.shares, s)
		} else {
			c.whole = append(c.whole, s)
		}
	}
	existing, kept, places := o.partitions(held, set)
	for _, partitions := range [][]Partition{existing, kept, places} {
		ownCounters(set, partitions)
	}
	for _, p := range existing {
		if !barred(p, held) {
			c.existing = append(c.existing, o.shapes(p, p.profile, true, index)...)
		}
	}
	for _, p := range kept {
		c.existing = append(c.existing, o.shapes(p, p.profile, false, index)...)
	}
	for _, p := range places {
		c.places = append(c.places, o.shapes(p, p.profile, true, index)...)
	}
	isShare := func(s Shape) bool { _, is := s.(Shared); return is }
	c.overlaps = c.overlaps || len(c.shares) > 0 || slices.ContainsFunc(c.existing, isShare)
	return c
}

// partitions are those that exist and are offered, those that are only kept because a claim holds
// them or a share of them, and places.
func (o Offering) partitions(held []holding, set budget) (there, kept, free []Partition) {
	for _, i := range o.Instances {
		there = append(there, existing(o.GPU, i, set)...)
	}
	if o.Placements {
		free = places(o.GPU, o.Profiles, set)
	}
	for _, h := range held {
		is := func(p Partition) bool { return p.Name() == h.Unshared().String() }
		if h.known && !slices.ContainsFunc(there, is) && !slices.ContainsFunc(free, is) && !slices.ContainsFunc(kept, is) {
			kept = append(kept, h.partition)
		}
	}
	return there, kept, free
}

// ownCounters gives a counter to each partition that shares nothing with others but memory, as
// compute instances of one GPU instance do. It keeps the partition and its shares apart. The API
// allows a set so many counters. No card has as many instances, but what it says is not trusted.
func ownCounters(set budget, partitions []Partition) {
	for i := range partitions {
		p := &partitions[i]
		p.set = set
		if !p.exclusive() && len(set) < resourceapi.ResourceSliceMaxCountersPerCounterSet {
			set[p.ownCounter()], p.cost[p.ownCounter()] = 1, 1
		}
	}
}

// barred says whether a claim holds what cannot be had beside the partition, and counters do not
// keep them apart.
func barred(p Partition, held []holding) bool {
	return slices.ContainsFunc(held, func(h holding) bool {
		return (h.untold() || !p.cost.placed()) && h.Unshared().String() != p.Name() && Conflict(h.Name, p.name(), p.gpu)
	})
}

// shapes are a device, where it is offered or held, and its shares.
func (o Offering) shapes(s shareable, profile string, offered bool, index int) []Shape {
	counted, held := o.Held[s.Name()]
	if held && !counted {
		return []Shape{uncounted(s)}
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

// share is how a shape of the GPU at a place among the node's is shared.
func (o Offering) share(s shareable, profile string, offered bool, index int) Share {
	share := o.Shares.For(o.GPU, profile, index)
	if !offered || share.Fractions && o.NoFractions != "" {
		share = Share{}
	}
	name := s.name()
	name.Share = true
	if fractions, held := o.HeldShares[name.String()]; held && (!share.Offered() || share.Fractions != fractions) {
		return Share{Fractions: fractions, ending: true}
	}
	return share
}

// uncount takes the counters away where nothing overlaps.
func (c card) uncount() {
	for _, shapes := range [][]Shape{c.whole, c.existing} {
		for i, s := range shapes {
			shapes[i] = uncounted(s)
		}
	}
}

func uncounted(s Shape) Shape {
	switch s := s.(type) {
	case Whole:
		return Whole{gpu: s.gpu}
	case Partition:
		s.counts = counts{}
		return s
	default:
		return s
	}
}

// holding is a device of the GPU that a claim holds.
type holding struct {
	Name
	// counted is how the device is published. Shares always are.
	counted bool
	// partition is known if the GPU has it, or can have it.
	partition Partition
	known     bool
}

// untold says that counters cannot tell others that the device is held: then nothing is offered
// that overlaps with it.
func (h holding) untold() bool { return !h.counted || h.Partition != nil && !h.known }

func (o Offering) holdings(set budget) []holding {
	var all []holding
	add := func(name string, share, counted bool) {
		if !strings.HasPrefix(name, o.WholeName()) {
			return
		}
		n, ok := ParseName(name)
		if !ok || n.GPU != o.WholeName() || n.Share != share {
			return
		}
		h := holding{Name: n, counted: counted}
		if n.Partition != nil {
			h.partition, h.known = o.partition(*n.Partition, set)
		}
		all = append(all, h)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Held)) {
		add(name, false, o.Held[name])
	}
	for _, name := range slices.Sorted(maps.Keys(o.HeldShares)) {
		add(name, true, true)
	}
	return all
}
