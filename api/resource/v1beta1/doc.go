// Package v1beta1 is what a user may write into the opaque configuration of a claim or of a DeviceClass: group resource.nvidia.com/v1beta1,
// kinds [GpuConfig], [MigDeviceConfig] and [VfioDeviceConfig], one for each kind of device.
//
// A configuration goes through three doors, in this order: [Decode] reads it strictly, Default fills what was left out, Validate says whether
// it means something. Field names and values are those of NVIDIA's reference driver, so that existing manifests keep their meaning.
//
// The package promises that no input makes it panic, that each error is one short line that names the field and the way out, and that a defaulted
// configuration, marshalled to JSON, decodes to itself. It does not know claims, devices or hardware, and does not say which strategies
// the driver can carry out.
package v1beta1

const (
	// Group is the API group of all kinds in this package.
	Group = "resource.nvidia.com"
	// Version is their version.
	Version = "v1beta1"
	// APIVersion is what a configuration carries in its field apiVersion.
	APIVersion = Group + "/" + Version
)
