package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// MigDeviceConfig configures MIG devices.
type MigDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Sharing says how containers share the MIG device. If unset, the driver sets up nothing.
	Sharing *MigSharing `json:"sharing,omitempty"`
}

// MigSharing is [Sharing] without settings for time slices. The length of time slices is a setting
// of the whole GPU, whose other partitions may belong to other claims.
type MigSharing struct {
	// Strategy is TimeSlicing or MPS.
	Strategy SharingStrategy `json:"strategy"`
	// MPS are the settings of strategy MPS.
	MPS *MPSConfig `json:"mpsConfig,omitempty"`
}

var _ Config = &MigDeviceConfig{}

const kindMigDeviceConfig = "MigDeviceConfig"

// Kind returns "MigDeviceConfig".
func (c *MigDeviceConfig) Kind() string { return kindMigDeviceConfig }

// Default sets apiVersion and kind, and fills in missing settings of the sharing strategy that the
// user requested. It never chooses a strategy.
func (c *MigDeviceConfig) Default() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: kindMigDeviceConfig}
	if c.Sharing != nil && c.Sharing.Strategy == SharingMPS && c.Sharing.MPS == nil {
		c.Sharing.MPS = &MPSConfig{}
	}
}

// Validate returns an error for an invalid setting, and for a setting of another sharing strategy
// than the requested one.
func (c *MigDeviceConfig) Validate() error {
	if c.Sharing == nil {
		return nil
	}
	sharing := Sharing{Strategy: c.Sharing.Strategy, MPS: c.Sharing.MPS}
	return inKind(kindMigDeviceConfig, sharing.validate())
}

// SharingStrategy returns the requested strategy, or [SharingNone].
func (c *MigDeviceConfig) SharingStrategy() SharingStrategy {
	if c.Sharing == nil {
		return SharingNone
	}
	return c.Sharing.Strategy
}
