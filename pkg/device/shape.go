package device

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Shape is one way in which a GPU is offered. Passthrough functions and shares will be shapes of their own beside [Whole] and [Partition].
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
// one does not go through the partitions of all, then one GPU after the other with its small partitions first, so that a GPU is filled before the next
// is begun. GPUs are ordered by PCI address.
func Offer(offerings []Offering) []Shape {
	sorted := slices.Clone(offerings)
	slices.SortFunc(sorted, func(a, b Offering) int { return strings.Compare(string(a.PCIAddress), string(b.PCIAddress)) })
	var whole, parts []Shape
	for _, o := range sorted {
		var all budget
		if o.Counters {
			all = budgetOf(o.MIG)
		}
		if o.Whole {
			whole = append(whole, Whole{o.GPU, all})
		}
		if o.Placements && all != nil {
			parts = append(parts, places(o.GPU, all)...)
			continue // an instance is a placement that is taken
		}
		for _, i := range o.Instances {
			parts = append(parts, existing(o.GPU, i)...)
		}
	}
	return append(whole, parts...)
}
