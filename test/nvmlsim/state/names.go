package state

import (
	"fmt"
	"slices"
	"sort"
	"strings"
)

// nvmlErrors maps the names of nvmlReturn_t errors in nvml.h to their values.
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

// recoveryActions maps names to the NVML_GPU_RECOVERY_ACTION_* values of nvml.h.
var recoveryActions = map[string]uint32{
	"none": 0, "gpu-reset": 1, "node-reboot": 2, "drain-p2p": 3, "drain-and-reset": 4, "recover-imex-domain": 5, "bus-reset": 6,
	"system-reboot": 7,
}

// fabricStates maps names to the NVML_GPU_FABRIC_STATE_* values of nvml.h.
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

// ParseError converts an error's name, such as NVML_ERROR_UNKNOWN, to its value.
func ParseError(text string) (uint32, error) {
	if value, ok := nvmlErrors[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(nvmlErrors))
}

// ParseRecovery converts a recovery action's name to its value.
func ParseRecovery(text string) (uint32, error) {
	if value, ok := recoveryActions[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(recoveryActions))
}

// ParseFabric converts a fabric state's name to its value.
func ParseFabric(text string) (uint32, error) {
	if value, ok := fabricStates[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(fabricStates))
}

// ErrorName returns the name of an nvmlReturn_t value.
func ErrorName(value uint32) string { return name(nvmlErrors, value) }

// RecoveryName returns the name of a recovery action.
func RecoveryName(value uint32) string { return name(recoveryActions, value) }

// beyond lists the operations outside NVML for which faults can be injected.
var beyond = append([]string{
	"setTimeSlice", "getTimeSlice", "mpsControlStart", "mpsControlCommand", "mpsServerStart", "cudaAttach",
}, sysfsWrites...)

// The writes to the simulated sysfs. A fault for one function's writes has its address in its name:
// sysfsUnbind@0000:1b:00.0.
const (
	SysfsOverride = "sysfsOverride"
	SysfsBind     = "sysfsBind"
	SysfsUnbind   = "sysfsUnbind"
	SysfsProbe    = "sysfsProbe"
	SysfsNewID    = "sysfsNewID"
	SysfsRemoveID = "sysfsRemoveID"
	SysfsReset    = "sysfsReset"
)

var sysfsWrites = []string{SysfsOverride, SysfsBind, SysfsUnbind, SysfsProbe, SysfsNewID, SysfsRemoveID, SysfsReset}

// SysfsWrite returns the name of the write to sysfs that a fault's function names, and the address
// after an @, which may be missing. known is false for any other function.
func SysfsWrite(function string) (name, address string, known bool) {
	name, address, _ = strings.Cut(function, "@")
	return name, address, slices.Contains(sysfsWrites, name)
}

// sysfsErrors maps the names of the errors that a write to sysfs can have to their numbers.
var sysfsErrors = map[string]uint32{
	"EPERM": 1, "EIO": 5, "ENOMEM": 12, "EACCES": 13, "EBUSY": 16, "ENODEV": 19, "EINVAL": 22, "ENOSPC": 28, "EROFS": 30, "ETIMEDOUT": 110,
}

// ParseSysfsError converts an error's name, such as EIO, to its number.
func ParseSysfsError(text string) (uint32, error) {
	if value, ok := sysfsErrors[text]; ok {
		return value, nil
	}
	return 0, fmt.Errorf("%q is none of %s", text, names(sysfsErrors))
}

// Beyond returns the operations outside NVML for which faults can be injected.
func Beyond() []string { return slices.Clone(beyond) }

// FabricName returns the name of a fabric state.
func FabricName(value uint32) string { return name(fabricStates, value) }

// changing lists the functions that change the hardware. For these, a fault can also strike after
// the function has had its effect.
var changing = []string{
	"setTimeSlice", "nvmlDeviceSetPersistenceMode", "nvmlDeviceSetComputeMode", "nvmlDeviceSetMigMode",
	"nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement", "nvmlComputeInstanceDestroy",
}

// Changes reports whether a function changes the hardware, so that a fault can come after its
// effect.
func Changes(function string) bool {
	_, _, sysfs := SysfsWrite(function)
	return sysfs || slices.Contains(changing, function)
}
