package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// GpuConfig configures whole GPUs.
type GpuConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Sharing says how containers share the GPU. If unset, the driver sets up nothing, and the
	// containers of one claim share the GPU as the hardware allows.
	Sharing *Sharing `json:"sharing,omitempty"`
}

var _ Config = &GpuConfig{}

const kindGpuConfig = "GpuConfig"

// Kind returns "GpuConfig".
func (c *GpuConfig) Kind() string { return kindGpuConfig }

// Default sets apiVersion and kind, and fills in missing settings of the sharing strategy that the
// user requested. It never chooses a strategy.
func (c *GpuConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindGpuConfig}
	if c.Sharing != nil {
		c.Sharing.setDefaults()
	}
}

// Validate returns an error for an invalid setting, and for a setting of another sharing strategy
// than the requested one.
func (c *GpuConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	return inKind(kindGpuConfig, c.Sharing.validate())
}

// SharingStrategy returns the requested strategy, or [SharingNone].
func (c *GpuConfig) SharingStrategy() SharingStrategy {
	if c.Sharing == nil {
		return SharingNone
	}
	return c.Sharing.Strategy
}
