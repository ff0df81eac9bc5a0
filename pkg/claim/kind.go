package claim

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// configKindFor returns the kind of configuration for the device called name. It returns ok false
// if this driver does not know the form of the name.
func configKindFor(name string) (kind string, ok bool) {
	n, ok := device.ParseName(name)
	switch {
	case !ok:
		return "", false
	case n.Partition != nil:
		return (&v1beta1.MigDeviceConfig{}).Kind(), true
	default:
		return (&v1beta1.GpuConfig{}).Kind(), true
	}
}
