package v1beta1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// VfioDeviceConfig configures GPUs that are passed through to a virtual machine.
type VfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// IOMMU says through which of the kernel's interfaces the GPU is passed. Left out: the legacy one, without its API device.
	IOMMU *IOMMUConfig `json:"iommu,omitempty"`
}

// IOMMUConfig picks between the kernel's two interfaces for passing devices through.
type IOMMUConfig struct {
	// BackendPolicy is LegacyOnly or PreferIommuFD. Left out: LegacyOnly.
	BackendPolicy IOMMUBackendPolicy `json:"backendPolicy"`
	// EnableAPIDevice also gives the container /dev/iommu or /dev/vfio/vfio, whichever goes with the interface. Left out: false.
	EnableAPIDevice *bool `json:"enableAPIDevice,omitempty"`
}

// IOMMUBackendPolicy says which interface is taken.
type IOMMUBackendPolicy string

const (
	// IOMMULegacyOnly takes VFIO's own containers and groups.
	IOMMULegacyOnly IOMMUBackendPolicy = "LegacyOnly"
	// IOMMUPreferIommuFD takes iommufd where the host has it.
	IOMMUPreferIommuFD IOMMUBackendPolicy = "PreferIommuFD"
)

var _ Config = &VfioDeviceConfig{}

const kindVfioDeviceConfig = "VfioDeviceConfig"

// Kind is "VfioDeviceConfig".
func (c *VfioDeviceConfig) Kind() string { return kindVfioDeviceConfig }

// Default fills apiVersion, kind and the IOMMU's settings.
func (c *VfioDeviceConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindVfioDeviceConfig}
	if c.IOMMU == nil {
		c.IOMMU = &IOMMUConfig{}
	}
	if c.IOMMU.BackendPolicy == "" {
		c.IOMMU.BackendPolicy = IOMMULegacyOnly
	}
	if c.IOMMU.EnableAPIDevice == nil {
		c.IOMMU.EnableAPIDevice = ptr.To(false)
	}
}

// Validate refuses an unknown policy.
func (c *VfioDeviceConfig) Validate() error {
	if c.IOMMU == nil {
		return nil
	}
	switch c.IOMMU.BackendPolicy {
	case IOMMULegacyOnly, IOMMUPreferIommuFD:
		return nil
	default:
		return fmt.Errorf("%s: iommu.backendPolicy is %s: set it to %s or %s", kindVfioDeviceConfig, quote(string(c.IOMMU.BackendPolicy)), IOMMULegacyOnly, IOMMUPreferIommuFD)
	}
}
