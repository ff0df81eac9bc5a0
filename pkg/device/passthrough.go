package device

import (
	"fmt"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
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
	// BoundByAdmin is true if an admin bound the GPU to a VFIO driver. Such a GPU is offered to
	// virtual machines only, and never bound to another driver.
	BoundByAdmin bool `json:"boundByAdmin,omitempty"`
	// HasDriver is true if a kernel driver has the GPU: NVIDIA's, or one of VFIO.
	HasDriver bool `json:"hasDriver,omitempty"`
}

// PassthroughSettings is the setting "passthrough": which GPUs are offered to virtual machines.
type PassthroughSettings struct {
	// Enabled applies to GPUs that no rule selects. Nil means false.
	Enabled *bool `yaml:"enabled,omitempty"`
	// Rules are for some GPUs. The last rule that selects a GPU applies.
	Rules []PassthroughRule `yaml:"rules,omitempty"`
}

// PassthroughRule says whether the GPUs that GPUs selects are offered to virtual machines. A
// selector is as in a [MIGRule].
type PassthroughRule struct {
	GPUs    string `yaml:"gpus,omitempty"`
	Enabled *bool  `yaml:"enabled"`
}

// Any reports whether the settings offer any GPU to virtual machines.
func (s PassthroughSettings) Any() bool {
	return ptr.Deref(s.Enabled, false) ||
		slices.ContainsFunc(s.Rules, func(r PassthroughRule) bool { return ptr.Deref(r.Enabled, false) })
}

type passthroughRule struct {
	selector selector
	enabled  bool
}

// Policies returns policies that say only which GPUs are offered to virtual machines, or the
// invalid fields below at.
func (s PassthroughSettings) Policies(at *field.Path) (Policies, field.ErrorList) {
	var p Policies
	var all field.ErrorList
	if s.Enabled != nil {
		p.passthrough = []passthroughRule{{"*", *s.Enabled}}
	}
	for i, r := range s.Rules {
		at := at.Child("rules").Index(i)
		selector, errs := parseSelector(at.Child("gpus"), r.GPUs)
		all = append(all, errs...)
		if r.Enabled == nil {
			all = append(all, field.Required(at.Child("enabled"), "want true or false"))
		}
		p.passthrough = append(p.passthrough, passthroughRule{selector, ptr.Deref(r.Enabled, false)})
	}
	if len(all) > 0 {
		return Policies{}, all
	}
	return p, nil
}

// VFIO is a GPU that is offered to virtual machines as a whole.
type VFIO struct {
	gpu GPU
	counts
}

// PassthroughOnly reports whether NVML does not list the GPU, so that only sysfs says what it is,
// and nothing but a virtual machine can use it.
func (g GPU) PassthroughOnly() bool { return g.Passthrough != nil && g.UUID == "" }

var _ Shape = VFIO{}

func (v VFIO) Name() string { return Name{GPU: v.gpu.WholeName(), Passthrough: true}.String() }
func (v VFIO) GPU() GPU     { return v.gpu }

// Device returns the device with the attributes of a GPU, and those that NVIDIA's DRA driver has
// for VFIO. On a node without NVIDIA's GPU driver, only what sysfs says is known.
func (v VFIO) Device(d Driver) resourceapi.Device {
	attributes := commonAttributes(v.gpu, d)
	facts := ptr.Deref(v.gpu.Passthrough, Passthrough{})
	attributes["type"] = text("vfio")
	attributes["uuid"] = text(v.gpu.identity())
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
