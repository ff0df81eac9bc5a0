package device

import (
	"fmt"
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// Passthrough is what sysfs says about a GPU that can be passed to a virtual machine.
type Passthrough struct {
	VendorID uint16 `json:"vendorID"`
	DeviceID uint16 `json:"deviceID"`
	// AddressableMemory is how many bytes of address space the GPU's 64-bit memory regions take. A
	// virtual machine must reserve that much.
	AddressableMemory uint64 `json:"addressableMemory"`
	// IOMMUFD is true if the host's kernel has iommufd, the newer interface of VFIO.
	IOMMUFD bool `json:"iommufd,omitempty"`
	// BoundByAdmin is true if an admin bound the GPU to a VFIO driver. Such a GPU is offered to virtual
	// machines only, and never bound to another driver.
	BoundByAdmin bool `json:"boundByAdmin,omitempty"`
}

// VFIO is a GPU that is offered to virtual machines as a whole.
type VFIO struct {
	gpu GPU
	counts
}

var _ Shape = VFIO{}

func (v VFIO) Name() string { return Name{GPU: v.gpu.WholeName(), Passthrough: true}.String() }
func (v VFIO) GPU() GPU     { return v.gpu }

// Device returns the device with the attributes of a GPU, and those that NVIDIA's DRA driver has for
// VFIO. On a node without NVIDIA's GPU driver, only what sysfs says is known.
func (v VFIO) Device(d Driver) resourceapi.Device {
	attributes := commonAttributes(v.gpu, d)
	facts := ptr.Deref(v.gpu.Passthrough, Passthrough{})
	attributes["type"] = text("vfio")
	attributes["uuid"] = text(v.gpu.UUID)
	attributes["vendorID"] = text(fmt.Sprintf("%#04x", facts.VendorID))
	attributes["deviceID"] = text(fmt.Sprintf("%#04x", facts.DeviceID))
	attributes["iommuFDEnabled"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(facts.IOMMUFD)}
	memory := int64(min(facts.AddressableMemory, math.MaxInt64))
	return resourceapi.Device{
		Name:       v.Name(),
		Attributes: attributes,
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"addressableMemory": {Value: *resource.NewQuantity(memory, resource.BinarySI)},
		},
		ConsumesCounters: v.cost.consumed(v.gpu.WholeName()),
	}
}

func (v VFIO) partitionType() string { return perProduct("vfio", v.gpu) }
