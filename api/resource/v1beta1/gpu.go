package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// GpuConfig configures whole GPUs.
type GpuConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Sharing says how the containers that use the GPU share it. Left out: the driver sets up nothing, and containers of
	// one claim use the GPU side by side as the hardware lets them.
	Sharing *Sharing `json:"sharing,omitempty"`
}

var _ Config = &GpuConfig{}

const kindGpuConfig = "GpuConfig"

// Kind is "GpuConfig".
func (c *GpuConfig) Kind() string { return kindGpuConfig }

// Default fills the settings that go with the strategy. No strategy is chosen where none is given.
func (c *GpuConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindGpuConfig}
	if c.Sharing != nil {
		c.Sharing.setDefaults()
	}
}

// Validate refuses settings without meaning, and settings of a strategy other than the one given.
func (c *GpuConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	return inKind(kindGpuConfig, c.Sharing.validate())
}

// SharingStrategy is the strategy that the configuration asks for, [SharingNone] if it asks for none.
func (c *GpuConfig) SharingStrategy() SharingStrategy {
	if c.Sharing == nil {
		return SharingNone
	}
	return c.Sharing.Strategy
}
