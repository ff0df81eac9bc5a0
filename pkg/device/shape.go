package device

import resourceapi "k8s.io/api/resource/v1"

// Shape is one way in which a GPU is offered to the scheduler: as a whole ([Whole]), as a partition
// ([Partition]) or in shares ([Shared]). Each Shape is published as one device.
type Shape interface {
	// Name returns the device's name in the pool: a DNS label, stable across reboots.
	Name() string
	// GPU returns the physical card of the device.
	GPU() GPU
	// Device returns the device as published to the API server.
	Device(Driver) resourceapi.Device
	// partitionType returns a string that is the same for devices that cost the same counters,
	// wherever on the GPU they are placed.
	partitionType() string
	// counted returns the counter set of the GPU, or nil for a device that consumes no counters.
	counted() budget
}

// counts has the counter set of a GPU (set), and the amounts that one device consumes from this set
// (cost). Both are nil if the device consumes no counters.
type counts struct{ set, cost budget }

func (c counts) counted() budget { return c.set }

// exclusive reports whether the device consumes the full amount of some counter. Then the scheduler
// cannot allocate both the device and shares of it.
func (c counts) exclusive() bool {
	for name, n := range c.cost {
		if n == c.set[name] {
			return true
		}
	}
	return false
}
