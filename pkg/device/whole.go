package device

import (
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

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

// capacities returns the capacities of an unshared device. Unknown values are published as 0,
// because a selector that reads a missing capacity is an error. A 0 matches no selector for a
// minimum.
func capacities(memory uint64, known *Engines) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	e := ptr.Deref(known, Engines{})
	c := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: *resource.NewQuantity(int64(min(memory, math.MaxInt64)), resource.BinarySI)},
	}
	for name, n := range map[resourceapi.QualifiedName]uint32{
		"multiprocessors": e.Multiprocessors,
		"copyEngines":     e.CopyEngines,
		"decoders":        e.Decoders,
		"encoders":        e.Encoders,
		"jpegEngines":     e.JPEGEngines,
		"ofaEngines":      e.OFAEngines,
	} {
		c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
	}
	return c
}
