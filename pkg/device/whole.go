package device

import (
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// Whole is a GPU offered as it is.
type Whole struct{ gpu GPU }

var _ Shape = Whole{}

func (w Whole) Name() string { return w.gpu.WholeName() }
func (w Whole) GPU() GPU     { return w.gpu }

// Device carries the attributes by which claims select a GPU. parentUUID equals uuid, so that a claim can match a whole GPU
// and a partition of one card by the same attribute.
func (w Whole) Device(d Driver) resourceapi.Device {
	g := w.gpu
	attributes := attributes{
		"type":         {StringValue: ptr.To("gpu")},
		"parentUUID":   text(g.UUID),
		AttrPCIBusID:   text(string(g.PCIAddress)),
		"productName":  text(g.ProductName),
		"brand":        text(g.Brand),
		"architecture": text(g.Architecture),
		"uuid":         text(g.UUID),
	}
	attributes.driver(d)
	attributes.version("cudaComputeCapability", g.CUDAComputeCapability)
	attributes.place(g)
	return resourceapi.Device{
		Name:       w.Name(),
		Attributes: attributes,
		Capacity:   capacities(g),
	}
}

func capacities(g GPU) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	c := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: *resource.NewQuantity(int64(min(g.MemoryBytes, math.MaxInt64)), resource.BinarySI)},
	}
	if g.Engines == nil {
		return c
	}
	for name, n := range map[resourceapi.QualifiedName]uint32{
		"multiprocessors": g.Engines.Multiprocessors,
		"copyEngines":     g.Engines.CopyEngines,
		"decoders":        g.Engines.Decoders,
		"encoders":        g.Engines.Encoders,
		"jpegEngines":     g.Engines.JPEGEngines,
		"ofaEngines":      g.Engines.OFAEngines,
	} {
		c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
	}
	return c
}
