package state

import (
	"fmt"
	"slices"
	"sort"
	"strings"
)

// nvmlReturn_t of nvml.h, by name.
var nvmlErrors = map[string]uint32{
	"NVML_ERROR_UNINITIALIZED": 1, "NVML_ERROR_INVALID_ARGUMENT": 2, "NVML_ERROR_NOT_SUPPORTED": 3, "NVML_ERROR_NO_PERMISSION": 4,
	"NVML_ERROR_NOT_FOUND": 6, "NVML_ERROR_INSUFFICIENT_SIZE": 7, "NVML_ERROR_INSUFFICIENT_POWER": 8,
	"NVML_ERROR_DRIVER_NOT_LOADED": 9, "NVML_ERROR_TIMEOUT": 10, "NVML_ERROR_IRQ_ISSUE": 11, "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
	"NVML_ERROR_FUNCTION_NOT_FOUND": 13, "NVML_ERROR_CORRUPTED_INFOROM": 14, "NVML_ERROR_GPU_IS_LOST": 15,
	"NVML_ERROR_RESET_REQUIRED": 16, "NVML_ERROR_OPERATING_SYSTEM": 17, "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
	"NVML_ERROR_IN_USE": 19, "NVML_ERROR_MEMORY": 20, "NVML_ERROR_NO_DATA": 21, "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED": 22,
	"NVML_ERROR_INSUFFICIENT_RESOURCES": 23, "NVML_ERROR_FREQ_NOT_SUPPORTED": 24, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": 25,
	"NVML_ERROR_DEPRECATED": 26, "NVML_ERROR_NOT_READY": 27, "NVML_ERROR_GPU_NOT_FOUND": 28, "NVML_ERROR_INVALID_STATE": 29,
	"NVML_ERROR_UNKNOWN": 999,
}

// NVML_GPU_RECOVERY_ACTION_* of nvml.h, by name.
var recoveryActions = map[string]uint32{
	"none": 0, "gpu-reset": 1, "node-reboot": 2, "drain-p2p": 3, "drain-and-reset": 4, "recover-imex-domain": 5, "bus-reset": 6, "system-reboot": 7,
}

// NVML_GPU_FABRIC_STATE_* of nvml.h, by name.
var fabricStates = map[string]uint32{"notSupported": 0, "notStarted": 1, "inProgress": 2, "completed": 3}

func names(values map[string]uint32) string {
	var all []string
	for name := range values {
		all = append(all, name)
	}
	sort.Strings(all)
	return strings.Join(all, ", ")
}

func name(values map[string]uint32, value uint32) string {
	for name, v := range values {
		if v == value {
			return name
		}
	}
	return fmt.Sprint(value)
}

// ParseError reads an error's name, such as NVML_ERROR_UNKNOWN.
func ParseError(text string) (uint32, error) {
	if value, ok := nvmlErrors[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(nvmlErrors))
}

// ParseRecovery reads a recovery action's name.
func ParseRecovery(text string) (uint32, error) {
	if value, ok := recoveryActions[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(recoveryActions))
}

// ParseFabric reads a fabric state's name.
func ParseFabric(text string) (uint32, error) {
	if value, ok := fabricStates[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(fabricStates))
}

// ErrorName is the name of an error.
func ErrorName(value uint32) string { return name(nvmlErrors, value) }

// RecoveryName is the name of a recovery action.
func RecoveryName(value uint32) string { return name(recoveryActions, value) }

// beyond are what a fault can be ordered for besides NVML's functions.
var beyond = []string{"setTimeSlice", "getTimeSlice", "mpsControlStart", "mpsControlCommand", "mpsServerStart", "cudaAttach"}

// Beyond are the names, besides those of NVML's functions, that a fault can be ordered for.
func Beyond() []string { return slices.Clone(beyond) }

// FabricName is the name of a fabric state.
func FabricName(value uint32) string { return name(fabricStates, value) }

// changing are the functions that change something, so that a fault can come after their effect.
var changing = []string{
	"setTimeSlice", "nvmlDeviceSetPersistenceMode", "nvmlDeviceSetComputeMode", "nvmlDeviceSetMigMode",
	"nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement", "nvmlComputeInstanceDestroy",
}

// Changes tells whether a function changes something.
func Changes(function string) bool { return slices.Contains(changing, function) }
