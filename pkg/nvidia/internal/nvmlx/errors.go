package nvmlx

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// IsAbsent reports whether ret means that the requested object does not exist.
func IsAbsent(ret nvml.Return) bool {
	return ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT || ret == nvml.ERROR_NOT_FOUND
}

// ToError returns an NVML return code as an error, and nil for SUCCESS.
func ToError(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return Error(ret)
}

// Error is an NVML return code as an error. Its text does not come from the library, because
// the library may already be unloaded.
type Error nvml.Return

func (r Error) Error() string {
	if text, ok := returnTexts[nvml.Return(r)]; ok {
		return text
	}
	return fmt.Sprintf("NVML error %d", int(r))
}

var returnTexts = map[nvml.Return]string{
	nvml.ERROR_UNINITIALIZED:      "NVML is not initialized",
	nvml.ERROR_INVALID_ARGUMENT:   "an argument is invalid",
	nvml.ERROR_NOT_SUPPORTED:      "not supported by this GPU or driver",
	nvml.ERROR_NO_PERMISSION:      "no permission",
	nvml.ERROR_NOT_FOUND:          "not found",
	nvml.ERROR_DRIVER_NOT_LOADED:  "the NVIDIA kernel module is not loaded",
	nvml.ERROR_TIMEOUT:            "the driver timed out",
	nvml.ERROR_IRQ_ISSUE:          "the kernel has an interrupt problem with this GPU",
	nvml.ERROR_FUNCTION_NOT_FOUND: "the driver is too old for this query",
	nvml.ERROR_CORRUPTED_INFOROM:  "the GPU's infoROM is corrupted",
	nvml.ERROR_GPU_IS_LOST: "the GPU has fallen off the bus or is otherwise inaccessible " +
		"(reset it or reboot the node, and check dmesg for XIDs)",
	nvml.ERROR_RESET_REQUIRED:         "the GPU needs a reset",
	nvml.ERROR_OPERATING_SYSTEM:       "the operating system or a cgroup refused access",
	nvml.ERROR_IN_USE:                 "the GPU is in use",
	nvml.ERROR_MEMORY:                 "the driver is out of memory",
	nvml.ERROR_NOT_READY:              "the GPU is not ready",
	nvml.ERROR_INSUFFICIENT_SIZE:      "more answers than expected",
	nvml.ERROR_INSUFFICIENT_RESOURCES: "the GPU has not enough resources left",
	nvml.ERROR_UNKNOWN:                "unknown error of the driver",
}
