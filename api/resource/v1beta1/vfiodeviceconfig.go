package v1beta1

import (
	"fmt"

	"k8s.io/utils/ptr"
)

// VfioDeviceConfig configures a GPU that is passed through to a virtual machine.
type VfioDeviceConfig struct {
	TypeMeta `json:",inline"`
	// Iommu says by which of the kernel's interfaces the GPU is passed through.
	Iommu *IommuConfig `json:"iommu,omitempty"`
}

// IommuConfig picks the kernel's interface.
type IommuConfig struct {
	// BackendPolicy defaults to LegacyOnly.
	BackendPolicy IommuBackendPolicy `json:"backendPolicy"`
	// EnableAPIDevice also gives the container /dev/iommu or /dev/vfio/vfio. It defaults to false.
	EnableAPIDevice *bool `json:"enableAPIDevice,omitempty"`
}

// IommuBackendPolicy is a preference between the kernel's two interfaces.
type IommuBackendPolicy string

// The policies.
const (
	IommuPreferIommuFD IommuBackendPolicy = "PreferIommuFD"
	IommuLegacyOnly    IommuBackendPolicy = "LegacyOnly"
)

var _ Config = &VfioDeviceConfig{}

// Kind is VfioDeviceConfig.
func (c *VfioDeviceConfig) Kind() Kind { return KindVfioDeviceConfig }

// Default fills in the policy.
func (c *VfioDeviceConfig) Default() {
	if c.Iommu == nil {
		c.Iommu = &IommuConfig{}
	}
	if c.Iommu.BackendPolicy == "" {
		c.Iommu.BackendPolicy = IommuLegacyOnly
	}
	if c.Iommu.EnableAPIDevice == nil {
		c.Iommu.EnableAPIDevice = ptr.To(false)
	}
}

// Validate checks the policy.
func (c *VfioDeviceConfig) Validate() error {
	if c.Iommu == nil {
		return nil
	}
	switch c.Iommu.BackendPolicy {
	case IommuPreferIommuFD, IommuLegacyOnly:
		return nil
	default:
		return fmt.Errorf("iommu.backendPolicy %q is not known: want %s or %s", c.Iommu.BackendPolicy, IommuLegacyOnly, IommuPreferIommuFD)
	}
}
