package v1beta1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// VfioDeviceConfig configures whole GPUs that are passed through to a virtual machine.
type VfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// IOMMU selects the kernel interface for passthrough. Unset means VFIO's own interface, without
	// its API device.
	IOMMU *IOMMUConfig `json:"iommu,omitempty"`
}

// IOMMUConfig selects one of the kernel's two interfaces for passthrough: VFIO's own or iommufd.
type IOMMUConfig struct {
	// BackendPolicy is LegacyOnly or PreferIommuFD. Unset means LegacyOnly.
	BackendPolicy IOMMUBackendPolicy `json:"backendPolicy"`
	// EnableAPIDevice also gives the container the API device of the selected interface:
	// /dev/vfio/vfio for VFIO's own, /dev/iommu for iommufd. Unset means false.
	EnableAPIDevice *bool `json:"enableAPIDevice,omitempty"`
}

// IOMMUBackendPolicy says which kernel interface to use for passthrough.
type IOMMUBackendPolicy string

const (
	// IOMMULegacyOnly uses VFIO's own interface, with VFIO containers and groups.
	IOMMULegacyOnly IOMMUBackendPolicy = "LegacyOnly"
	// IOMMUPreferIommuFD uses iommufd if the host has it, otherwise VFIO's own interface.
	IOMMUPreferIommuFD IOMMUBackendPolicy = "PreferIommuFD"
)

var _ Config = &VfioDeviceConfig{}

const kindVfioDeviceConfig = "VfioDeviceConfig"

// Kind returns "VfioDeviceConfig".
func (c *VfioDeviceConfig) Kind() string { return kindVfioDeviceConfig }

// Default fills in apiVersion, kind and the settings in field iommu.
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

// SharingStrategy returns [SharingNone]: a GPU that is passed through cannot be shared.
func (c *VfioDeviceConfig) SharingStrategy() SharingStrategy { return SharingNone }

// Validate returns an error if iommu.backendPolicy has an unknown value.
func (c *VfioDeviceConfig) Validate() error {
	if c.IOMMU == nil {
		return nil
	}
	switch c.IOMMU.BackendPolicy {
	case IOMMULegacyOnly, IOMMUPreferIommuFD:
		return nil
	default:
		return fmt.Errorf("%s: iommu.backendPolicy is %s: set it to %s or %s", kindVfioDeviceConfig,
			quote(string(c.IOMMU.BackendPolicy)), IOMMULegacyOnly, IOMMUPreferIommuFD)
	}
}
