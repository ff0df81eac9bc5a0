package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// MigDeviceConfig configures MIG devices.
type MigDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Sharing says how the containers that use the MIG device share it. Left out: the driver sets up nothing.
	Sharing *MigSharing `json:"sharing,omitempty"`
}

// MigSharing is [Sharing] without settings for time slices: their length belongs to the GPU beneath, which other claims use too.
type MigSharing struct {
	// Strategy is TimeSlicing or MPS.
	Strategy SharingStrategy `json:"strategy"`
	// MPS goes with strategy MPS.
	MPS *MPSConfig `json:"mpsConfig,omitempty"`
}

var _ Config = &MigDeviceConfig{}

const kindMigDeviceConfig = "MigDeviceConfig"

// Kind is "MigDeviceConfig".
func (c *MigDeviceConfig) Kind() string { return kindMigDeviceConfig }

// Default fills the settings that go with the strategy. No strategy is chosen where none is given.
func (c *MigDeviceConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindMigDeviceConfig}
	if c.Sharing != nil && c.Sharing.Strategy == SharingMPS && c.Sharing.MPS == nil {
		c.Sharing.MPS = &MPSConfig{}
	}
}

// Validate refuses settings without meaning, and settings of a strategy other than the one given.
func (c *MigDeviceConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	sharing := Sharing{Strategy: c.Sharing.Strategy, MPS: c.Sharing.MPS}
	return inKind(kindMigDeviceConfig, sharing.validate())
}

// SharingStrategy is the strategy that the configuration asks for, [SharingNone] if it asks for none.
func (c *MigDeviceConfig) SharingStrategy() SharingStrategy {
	if c.Sharing == nil {
		return SharingNone
	}
	return c.Sharing.Strategy
}
