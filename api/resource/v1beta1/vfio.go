package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// VfioDeviceConfig configures GPUs that are passed through to a virtual machine. It has no settings.
type VfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
}

var _ Config = &VfioDeviceConfig{}

const kindVfioDeviceConfig = "VfioDeviceConfig"

// Kind is "VfioDeviceConfig".
func (c *VfioDeviceConfig) Kind() string { return kindVfioDeviceConfig }

// Default fills apiVersion and kind.
func (c *VfioDeviceConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindVfioDeviceConfig}
}

// Validate accepts it: there is nothing to get wrong.
func (c *VfioDeviceConfig) Validate() error { return nil }
