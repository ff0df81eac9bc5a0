package nvmlx

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// Has reports whether the driver's library has an NVML function. A call of a missing function would
// crash the process.
func Has(lib nvml.Interface, function string) bool {
	return lib.Extensions().LookupSymbol(function) == nil
}

// Load loads the driver's NVML library and does not start it. It also returns the library's
// path.
func Load(p nvidia.Paths) (nvml.Interface, string, error) {
	path, err := host.Library(p)
	if err != nil {
		return nil, "", err
	}
	return nvml.New(nvml.WithLibraryPath(path)), path, nil
}

// Open loads the driver's NVML library and starts it.
func Open(p nvidia.Paths) (nvml.Interface, error) {
	lib, path, err := Load(p)
	if err != nil {
		return nil, err
	}
	return lib, Start(lib, path)
}

// Start starts NVML. If the driver is absent, incomplete or of another version, NVML's answer
// is the first sign of it, so Start adds a remedy to it.
func Start(lib nvml.Interface, path string) error {
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return nvidia.NotReady("check that the library fits this machine (architecture, glibc) and can be read", "%s cannot be loaded", path)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return nvidia.NotReady("run modprobe nvidia on the node, and check dmesg if that fails", "the NVIDIA kernel module is not loaded")
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return nvidia.NotReady("finish the driver upgrade: unload the old kernel module (or reboot the node)",
			"the NVIDIA kernel module and %s are of different versions", path)
	case nvml.ERROR_NO_PERMISSION:
		return nvidia.NotReady("run the plugin privileged, or give it access to /dev/nvidiactl", "NVML may not talk to the driver")
	default:
		return fmt.Errorf("start NVML from %s: %w", path, ToError(ret))
	}
}
