package claim

import (
	"regexp"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

// wholeGPU is the form of device.GPU.WholeName. Other shapes' names begin like it and go on.
var wholeGPU = regexp.MustCompile(`^gpu-[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7]$`)

// kindFor is the kind of configuration that a device takes, by its name. It is false for a name that this driver does not give.
func kindFor(device string) (kind string, ok bool) {
	if wholeGPU.MatchString(device) {
		return (&v1beta1.GpuConfig{}).Kind(), true
	}
	return "", false
}
