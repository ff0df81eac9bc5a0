package claim

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// kindFor is the kind of configuration that a device takes, by its name. It is false for a name that this driver does not give.
func kindFor(name string) (kind string, ok bool) {
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
