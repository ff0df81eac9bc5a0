package v1beta1

// GpuConfig configures a GPU that is allocated as a whole.
type GpuConfig struct {
	TypeMeta `json:",inline"`
	// Sharing says how the containers that get the claim share the GPU. Without it they share it as processes on a GPU always do.
	Sharing *GpuSharing `json:"sharing,omitempty"`
}

// GpuSharing picks a strategy and configures it.
type GpuSharing struct {
	// Strategy is required.
	Strategy SharingStrategy `json:"strategy"`
	// TimeSlicingConfig may be set for strategy TimeSlicing only.
	TimeSlicingConfig *TimeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	// MpsConfig may be set for strategy MPS only.
	MpsConfig *MpsConfig `json:"mpsConfig,omitempty"`
}

var _ Config = &GpuConfig{}

// Kind is GpuConfig.
func (c *GpuConfig) Kind() Kind { return KindGpuConfig }

// Default gives a strategy its configuration.
func (c *GpuConfig) Default() {
	if c.Sharing == nil {
		return
	}
	switch c.Sharing.Strategy {
	case StrategyTimeSlicing:
		if c.Sharing.TimeSlicingConfig == nil {
			c.Sharing.TimeSlicingConfig = &TimeSlicingConfig{}
		}
		c.Sharing.TimeSlicingConfig.setDefaults()
	case StrategyMPS:
		if c.Sharing.MpsConfig == nil {
			c.Sharing.MpsConfig = &MpsConfig{}
		}
	}
}

// Validate checks the sharing strategy and its configuration.
func (c *GpuConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	if err := c.Sharing.Strategy.validate(); err != nil {
		return err
	}
	if c.Sharing.TimeSlicingConfig != nil {
		if err := onlyFor(StrategyTimeSlicing, c.Sharing.Strategy, "timeSlicingConfig"); err != nil {
			return err
		}
		if err := c.Sharing.TimeSlicingConfig.validate(); err != nil {
			return err
		}
	}
	return validateMps(c.Sharing.Strategy, c.Sharing.MpsConfig)
}
