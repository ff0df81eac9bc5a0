package device

import (
	"cmp"
	"fmt"
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
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
	// Attributes returns the attributes with which the device is published.
	Attributes(Driver) Attributes
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

// Attributes returns the attributes by which claims select a GPU. parentUUID equals uuid, so that a
// claim can match a whole GPU and a partition of one card by the same attribute.
func (w Whole) Attributes(d Driver) Attributes {
	a := commonAttributes(w.gpu, d)
	a["type"], a["uuid"] = text("gpu"), text(w.gpu.UUID)
	return a
}

func (w Whole) Device(d Driver) resourceapi.Device {
	return resourceapi.Device{
		Name:             w.Name(),
		Attributes:       w.Attributes(d),
		Capacity:         capacities(w.gpu.MemoryBytes, w.gpu.Engines),
		ConsumesCounters: w.cost.consumed(w.Name()),
	}
}

func (w Whole) partitionType() string { return perProduct("whole", w.gpu) }

func (w Whole) name() Name            { return Name{GPU: w.gpu.WholeName()} }
func (w Whole) memoryToShare() uint64 { return w.gpu.MemoryBytes }

// commonAttributes returns the attributes that all devices of a GPU have. The attribute parentUUID
// is always the UUID of the GPU, even on the device for the whole GPU. A GPU that NVML does not
// list has its PCI address instead, so that no two GPUs match each other by this attribute.
func commonAttributes(g GPU, d Driver) Attributes {
	a := Attributes{
		"parentUUID":     text(cmp.Or(g.UUID, "PCI-"+string(g.PCIAddress))),
		AttrPCIBusID:     text(string(g.PCIAddress)),
		"productName":    text(cmp.Or(g.ProductName, unknownFact)),
		"brand":          text(cmp.Or(g.Brand, unknownFact)),
		"architecture":   text(cmp.Or(g.Architecture, unknownFact)),
		"addressingMode": text(cmp.Or(g.AddressingMode, noAddressingMode)),

		// CEL can compare semantic versions. The driver's own text ("580.65.06") is not one.
		"cudaComputeCapability": version(g.CUDAComputeCapability),
		"driverVersion":         version(d.Version),
		"cudaDriverVersion":     version(d.CUDAVersion),
		"driverVersionString":   text(cmp.Or(d.Version, unknownFact)),
	}
	if g.PCIeRoot != "" {
		a[AttrPCIeRoot] = text(g.PCIeRoot)
	}
	if g.NUMANode != nil {
		a[AttrNUMANode] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(*g.NUMANode))}
	}
	return a
}

// VFIO is a GPU that is offered to virtual machines as a whole.
type VFIO struct {
	gpu GPU
	counts
}

var _ Shape = VFIO{}

func (v VFIO) Name() string { return Name{GPU: v.gpu.WholeName(), Passthrough: true}.String() }
func (v VFIO) GPU() GPU     { return v.gpu }

// Attributes returns the attributes of a GPU, and those that NVIDIA's DRA driver has for VFIO. On a
// node without NVIDIA's GPU driver, only what sysfs says is known.
func (v VFIO) Attributes(d Driver) Attributes {
	a := commonAttributes(v.gpu, d)
	facts := ptr.Deref(v.gpu.Passthrough, Passthrough{})
	a["type"], a["uuid"] = text("vfio"), a["parentUUID"]
	a["vendorID"] = text(fmt.Sprintf("%#04x", facts.VendorID))
	a["deviceID"] = text(fmt.Sprintf("%#04x", facts.DeviceID))
	a["iommuFDEnabled"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(facts.IOMMUFD)}
	return a
}

func (v VFIO) Device(d Driver) resourceapi.Device {
	memory := int64(min(ptr.Deref(v.gpu.Passthrough, Passthrough{}).AddressableMemory, math.MaxInt64))
	return resourceapi.Device{
		Name:       v.Name(),
		Attributes: v.Attributes(d),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"addressableMemory": {Value: *resource.NewQuantity(memory, resource.BinarySI)},
		},
		ConsumesCounters: v.cost.consumed(v.gpu.WholeName()),
	}
}

func (v VFIO) partitionType() string { return perProduct("vfio", v.gpu) }

// shareable returns the device that n names, or the unshared device if n names a share device.
// known is false for a partition that the GPU neither has nor can have.
func (g GPU) shareable(n Name) (of shareable, known bool) {
	switch {
	case n.Passthrough:
		return nil, false
	case n.Partition == nil:
		return Whole{gpu: g}, true
	}
	return g.partition(*n.Partition, counterSetOf(g))
}

// AllocatedAttributes returns the attributes with which the device n of the GPU g is published.
// fractions says which kind of shares a shared device has. A partition that the inventory does not
// have yet has [UUIDNotCreated].
func AllocatedAttributes(g GPU, n Name, fractions bool, d Driver) Attributes {
	if n.Passthrough {
		return VFIO{gpu: g}.Attributes(d)
	}
	of, known := g.shareable(n)
	if !known {
		of = Partition{gpu: g, part: *n.Partition}
	}
	if n.Share {
		return Shared{of, Share{Fractions: fractions}}.Attributes(d)
	}
	return of.Attributes(d)
}

// Has reports whether n names the whole GPU, also for virtual machines, or a partition that the GPU
// has or can have, or a share device of these. The zero GPU has no devices.
func (g GPU) Has(n Name) bool {
	_, known := g.shareable(n)
	known = known || n.Passthrough && g.Passthrough != nil
	return known && n.GPU == g.WholeName()
}
