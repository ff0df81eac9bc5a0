package device

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Shape is one way in which a GPU is offered: [Whole], [Partition] or [Shared]. Passthrough functions will be shapes of their own.
type Shape interface {
	// Name is the device's name in the pool: a DNS label, stable over reboots.
	Name() string
	// GPU is the physical card that the shape is cut from.
	GPU() GPU
	// Device is the shape as the API server sees it.
	Device(Driver) resourceapi.Device
	// partitionType is the same for shapes that cost the same.
	partitionType() string
	// counted is what the GPU's shapes take their parts of. It is nil where they do not overlap.
	counted() budget
}

// Offer lists every shape of the GPUs, in publishing order. Allocation is first-fit, so this order is a cost: whole GPUs come first, so that a claim for
// one does not go through the partitions of all, then shares of these, then one GPU after the other with its small partitions first, each before its shares, so
// that a GPU is filled before the next is begun. Whole GPUs are ordered by PCI address, and partitions begin with the last of them: a scheduler evaluates the
// expressions of a claim for each partition of a GPU that somebody has whole before it goes on to the next. The GPUs are all that the node has: share rules may
// count them.
func Offer(offerings []Offering) []Shape {
	var whole, shares, parts []Shape
	for index, o := range byPlace(offerings) {
		partitions, all := o.partitions(index)
		if o.Whole {
			w := Whole{o.GPU, all}
			whole = append(whole, w)
			shares = append(shares, sharesOf(w, o.share(w, "", index))...)
		}
		var of []Shape
		for _, p := range partitions {
			of = append(of, p)
			of = append(of, sharesOf(p, o.share(p, p.profile, index))...)
		}
		parts = append(of, parts...)
	}
	return slices.Concat(whole, shares, parts)
}

func byPlace(offerings []Offering) []Offering {
	sorted := slices.Clone(offerings)
	slices.SortFunc(sorted, func(a, b Offering) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	return sorted
}

// partitions that are offered of the GPU at a place among the node's, and what all of its shapes take their parts of.
func (o Offering) partitions(index int) ([]Partition, budget) {
	if o.Counters {
		if all := budgetOf(o.MIG); all != nil && o.Placements {
			return places(o.GPU, all), all // an instance is a placement that is taken
		} else if all != nil {
			return o.existing(), all
		}
	}
	all := budget{}
	if w := (Whole{gpu: o.GPU}); (Shared{w, o.share(w, "", index)}).possible() && o.Whole {
		all[wholeCounter] = deviceTotal
	}
	partitions := o.existing()
	for i := range partitions {
		p := &partitions[i]
		// The API allows a set so many counters. No card has as many instances, but what it says is not trusted.
		if (Shared{p, o.share(p, p.profile, index)}).possible() && len(all) < resourceapi.ResourceSliceMaxCountersPerCounterSet {
			all[p.counter()] = deviceTotal
		}
	}
	if len(all) == 0 {
		return partitions, nil
	}
	for i := range partitions {
		p := &partitions[i]
		p.budget, p.cost = all, all.alone(p.counter())
	}
	return partitions, all
}

// share is how a shape of the GPU at a place among the node's is shared.
func (o Offering) share(s shareable, profile string, index int) Share {
	share := o.Shares.For(o.GPU, profile, index)
	if share.Fractions && o.NoFractions != "" {
		share = Share{}
	}
	name := s.name()
	name.Share = true
	if fractions, held := o.HeldShares[name.String()]; held && (!share.Offered() || share.Fractions != fractions) {
		return Share{Fractions: fractions, ending: true}
	}
	return share
}

func (o Offering) existing() []Partition {
	var all []Partition
	for _, i := range o.Instances {
		all = append(all, existing(o.GPU, i)...)
	}
	return all
}
