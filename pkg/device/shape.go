package device

import (
	"sort"

	resourceapi "k8s.io/api/resource/v1"
)

// Shape is one way in which a GPU is offered. Partitions, passthrough functions and shares will be shapes of their own beside [Whole].
type Shape interface {
	// Name is the device's name in the pool: a DNS label, stable over reboots.
	Name() string
	// GPU is the physical card that the shape is cut from.
	GPU() GPU
	// Device is the shape as the API server sees it.
	Device(Driver) resourceapi.Device
}

// Offer lists every shape of the GPUs, in publishing order. Allocation is first-fit, so this order is a cost:
// whole GPUs come first and are ordered by PCI address.
func Offer(gpus []GPU) []Shape {
	sorted := append([]GPU(nil), gpus...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].PCIAddress < sorted[j].PCIAddress })
	shapes := make([]Shape, 0, len(sorted))
	for _, g := range sorted {
		shapes = append(shapes, Whole{g})
	}
	return shapes
}
