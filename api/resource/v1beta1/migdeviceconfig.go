package v1beta1

// MigDeviceConfig configures a MIG device. Time slices cannot be set for MIG devices, so that strategy has no configuration here.
type MigDeviceConfig struct {
	TypeMeta `json:",inline"`
	// Sharing says how the containers that get the claim share the MIG device.
	Sharing *MigDeviceSharing `json:"sharing,omitempty"`
}

// MigDeviceSharing picks a strategy and configures it.
type MigDeviceSharing struct {
	// Strategy is required.
	Strategy SharingStrategy `json:"strategy"`
	// MpsConfig may be set for strategy MPS only.
	MpsConfig *MpsConfig `json:"mpsConfig,omitempty"`
}

var _ Config = &MigDeviceConfig{}

// Kind is MigDeviceConfig.
func (c *MigDeviceConfig) Kind() Kind { return KindMigDeviceConfig }

// Default gives strategy MPS its configuration.
func (c *MigDeviceConfig) Default() {
	if c.Sharing != nil && c.Sharing.Strategy == StrategyMPS && c.Sharing.MpsConfig == nil {
		c.Sharing.MpsConfig = &MpsConfig{}
	}
}

// Validate checks the sharing strategy and its configuration.
func (c *MigDeviceConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	if err := c.Sharing.Strategy.validate(); err != nil {
		return err
	}
	return validateMps(c.Sharing.Strategy, c.Sharing.MpsConfig)
}
