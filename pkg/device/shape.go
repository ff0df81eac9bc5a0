package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Shape is one way in which a GPU is offered to the scheduler: as a whole ([Whole]), to a virtual
// machine ([VFIO]), as a partition ([Partition]) or in shares ([Shared]). Each Shape is published
// as one device.
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

// Whole is a GPU that is offered as a whole.
type Whole struct {
	gpu GPU
	counts
}

var _ shareable = Whole{}

func (w Whole) Name() string { return w.gpu.WholeName() }
func (w Whole) GPU() GPU     { return w.gpu }

// Device returns the device with the attributes by which claims select a GPU. parentUUID equals
// uuid, so that a claim can match a whole GPU and a partition of one card by the same attribute.
func (w Whole) Device(d Driver) resourceapi.Device {
	g := w.gpu
	attributes := commonAttributes(g, d)
	attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("gpu")}
	attributes["uuid"] = text(g.UUID)
	return resourceapi.Device{
		Name:             w.Name(),
		Attributes:       attributes,
		Capacity:         capacities(g.MemoryBytes, g.Engines),
		ConsumesCounters: w.cost.consumed(w.Name()),
	}
}

func (w Whole) partitionType() string { return perProduct("whole", w.gpu) }

func (w Whole) name() Name            { return Name{GPU: w.gpu.WholeName()} }
func (w Whole) memoryToShare() uint64 { return w.gpu.MemoryBytes }
