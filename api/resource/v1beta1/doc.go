// Package v1beta1 defines the opaque configuration of claims and DeviceClasses: API group
// resource.nvidia.com/v1beta1. Each type of device has its kind: [GpuConfig], [MigDeviceConfig] and
// [VfioDeviceConfig].
//
// A configuration is used in three steps. [Decode] reads it strictly, Default fills in missing
// values, and Validate checks it. Field names and values are those of NVIDIA's DRA driver, so that
// existing manifests keep their meaning.
//
// The package promises three things. No input makes it panic. Each error is one short line that
// names the field and says how to correct it. A configuration with defaults, marshalled to JSON,
// decodes to itself. The package knows no claims, devices or hardware, and does not know which
// strategies the driver supports.
package v1beta1

const (
	// Group is the API group of all kinds in this package.
	Group = "resource.nvidia.com"
	// Version is the version of all kinds in this package.
	Version = "v1beta1"
	// APIVersion is the value of a configuration's field apiVersion.
	APIVersion = Group + "/" + Version
)
