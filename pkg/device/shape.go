package device

import resourceapi "k8s.io/api/resource/v1"

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
	// counted is the counter set of the GPU. It is nil for a shape that takes nothing of it.
	counted() budget
}

// counts is what a shape takes of its GPU's counter set. Both are nil where the node's devices are
// not counted.
type counts struct{ set, cost budget }

func (c counts) counted() budget { return c.set }

// exclusive says whether nobody else can take the same. Then shares exclude what they are of.
func (c counts) exclusive() bool {
	for name, n := range c.cost {
		if n == c.set[name] {
			return true
		}
	}
	return false
}
