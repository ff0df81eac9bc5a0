package conformance

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// DeviceGetters is the closed list of the functions of a GPU that may run with CAP_SYS_ADMIN on
// real hardware, where a setter would take effect. A test compares it with a list of names.
type DeviceGetters interface {
	GetPciInfo() (nvml.PciInfo, nvml.Return)
	GetMigMode() (int, int, nvml.Return)
	GetGpuInstanceProfileInfo(int) (nvml.GpuInstanceProfileInfo, nvml.Return)
	GetGpuInstancePossiblePlacements(*nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return)
	GetFieldValues([]nvml.FieldValue) nvml.Return
	GetSupportedEventTypes() (uint64, nvml.Return)
	GetGpuFabricInfo() (nvml.GpuFabricInfo, nvml.Return)
	GetGpuFabricInfoV() nvml.GpuFabricInfoHandler
	GetRepairStatus() (nvml.RepairStatus, nvml.Return)
	GetUnrepairableMemoryFlag_v1() (nvml.UnrepairableMemoryStatus_v1, nvml.Return)
	GetSramEccErrorStatus() (nvml.EccSramErrorStatus, nvml.Return)
	GetCurrentClocksEventReasons() (uint64, nvml.Return)
	GetSupportedClocksEventReasons() (uint64, nvml.Return)
	GetRemappedRows() (int, int, bool, bool, nvml.Return)
	GetEccMode() (nvml.EnableState, nvml.EnableState, nvml.Return)
	GetMemoryInfo() (nvml.Memory, nvml.Return)
	GetPersistenceMode() (nvml.EnableState, nvml.Return)
	GetComputeMode() (nvml.ComputeMode, nvml.Return)
	GetVirtualizationMode() (nvml.GpuVirtualizationMode, nvml.Return)
	GetMaxMigDeviceCount() (int, nvml.Return)
	GetMigDeviceHandleByIndex(int) (nvml.Device, nvml.Return)
	GetGpuInstanceById(int) (nvml.GpuInstance, nvml.Return)
	GetGpuInstances(*nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return)
	GetGpuInstanceProfileInfoV(int) nvml.GpuInstanceProfileInfoHandler
	GetRetiredPagesPendingStatus() (nvml.EnableState, nvml.Return)
	GetTotalEnergyConsumption() (uint64, nvml.Return)
	GetTotalEccErrors(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return)
}

// SystemGetters is the closed list of the functions of the whole machine.
type SystemGetters interface {
	SystemGetConfComputeState() (nvml.ConfComputeSystemState, nvml.Return)
	SystemGetConfComputeGpusReadyState() (uint32, nvml.Return)
	DeviceGetHandleByPciBusId(string) (nvml.Device, nvml.Return)
}

// noGPU is a PCI address without a GPU.
const noGPU = "0000:FF:1F.0"

// profileValues is the number of NVML profile values to ask for. It is more than the header names,
// because a newer driver may know more.
const profileValues = 32

// readFields are the fields to read, with what they mean.
var readFields = []struct {
	id   uint32
	name string
}{
	{nvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED, "MIG mode changes without a reset"},
	{nvml.FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE, "MIG queries work in either MIG mode"},
	{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, "recovery action"},
	{nvml.FI_DEV_REMAPPED_COR, "rows remapped for correctable errors"},
	{nvml.FI_DEV_REMAPPED_UNC, "rows remapped for uncorrectable errors"},
	{nvml.FI_DEV_REMAPPED_PENDING, "row remap pending"},
	{nvml.FI_DEV_REMAPPED_FAILURE, "row remap failed"},
}

// AskSystem calls every SystemGetters function and adds its answer. has says whether the driver's
// library has a function: go-nvml ends the process if it calls one that is missing.
func AskSystem(system SystemGetters, has func(string) bool, answers facts.Answers) {
	for _, q := range []struct {
		name, function string
		ask            func() (string, nvml.Return)
	}{
		{"confidential computing", "nvmlSystemGetConfComputeState", func() (string, nvml.Return) {
			state, ret := system.SystemGetConfComputeState()
			return fmt.Sprintf("environment %d, feature %d, developer mode %d", state.Environment, state.CcFeature, state.DevToolsMode), ret
		}},
		{"ready state", "nvmlSystemGetConfComputeGpusReadyState", func() (string, nvml.Return) {
			ready, ret := system.SystemGetConfComputeGpusReadyState()
			return fmt.Sprint(ready), ret
		}},
		{"a PCI address without a GPU", "nvmlDeviceGetHandleByPciBusId_v2", func() (string, nvml.Return) {
			_, ret := system.DeviceGetHandleByPciBusId(noGPU)
			return "a handle", ret
		}},
	} {
		record(answers, "machine: "+q.name, q.function, has, q.ask)
	}
}

// AskDevice calls every DeviceGetters function and adds its answer under the GPU's PCI address.
func AskDevice(device DeviceGetters, has func(string) bool, answers facts.Answers) {
	pci, _ := device.GetPciInfo()
	add := func(question, function string, ask func() (string, nvml.Return)) {
		record(answers, text(pci.BusId[:])+": "+question, function, has, ask)
	}
	add("MIG mode", "nvmlDeviceGetMigMode", func() (string, nvml.Return) {
		current, pending, ret := device.GetMigMode()
		return fmt.Sprintf("%d, pending %d", current, pending), ret
	})
	for value := range profileValues {
		askProfile(device, value, add)
	}
	for _, field := range readFields {
		add(fmt.Sprintf("field %d (%s)", field.id, field.name), "nvmlDeviceGetFieldValues", func() (string, nvml.Return) {
			values := []nvml.FieldValue{{FieldId: field.id}}
			ret := device.GetFieldValues(values)
			if ret == nvml.SUCCESS {
				ret = nvml.Return(values[0].NvmlReturn) //nolint:gosec // NVML's own number
			}
			return fmt.Sprint(binary.LittleEndian.Uint64(values[0].Value[:])), ret
		})
	}
	add("supported events", "nvmlDeviceGetSupportedEventTypes", func() (string, nvml.Return) {
		mask, ret := device.GetSupportedEventTypes()
		return fmt.Sprintf("%#x", mask), ret
	})
	add("fabric", "nvmlDeviceGetGpuFabricInfo", func() (string, nvml.Return) {
		info, ret := device.GetGpuFabricInfo()
		return fmt.Sprintf("state %d, status %d", info.State, info.Status), ret
	})
	add("remapped rows", "nvmlDeviceGetRemappedRows", func() (string, nvml.Return) {
		correctable, uncorrectable, pending, failed, ret := device.GetRemappedRows()
		return fmt.Sprintf("%d correctable, %d uncorrectable, pending %t, failed %t", correctable, uncorrectable, pending, failed), ret
	})
	add("ECC mode", "nvmlDeviceGetEccMode", func() (string, nvml.Return) {
		current, pending, ret := device.GetEccMode()
		return fmt.Sprintf("%d, pending %d", current, pending), ret
	})
	add("memory", "nvmlDeviceGetMemoryInfo", func() (string, nvml.Return) {
		memory, ret := device.GetMemoryInfo()
		return fmt.Sprintf("%d MiB", memory.Total>>20), ret
	})
	add("persistence mode", "nvmlDeviceGetPersistenceMode", func() (string, nvml.Return) {
		mode, ret := device.GetPersistenceMode()
		return fmt.Sprint(mode), ret
	})
	add("compute mode", "nvmlDeviceGetComputeMode", func() (string, nvml.Return) {
		mode, ret := device.GetComputeMode()
		return fmt.Sprint(mode), ret
	})
	add("virtualization mode", "nvmlDeviceGetVirtualizationMode", func() (string, nvml.Return) {
		mode, ret := device.GetVirtualizationMode()
		return fmt.Sprint(mode), ret
	})
	askFabric(device, add)
	askHealth(device, add)
	askInstances(device, add)
}

// askFabric asks for the versions of the fabric's state that have its health.
func askFabric(device DeviceGetters, add func(question, function string, ask func() (string, nvml.Return))) {
	const function = "nvmlDeviceGetGpuFabricInfoV"
	add("fabric, version 2", function, func() (string, nvml.Return) {
		info, ret := device.GetGpuFabricInfoV().V2()
		return fmt.Sprintf("state %d, status %d, health mask %#x", info.State, info.Status, info.HealthMask), ret
	})
	add("fabric, version 3", function, func() (string, nvml.Return) {
		info, ret := device.GetGpuFabricInfoV().V3()
		return fmt.Sprintf("state %d, status %d, health mask %#x, summary %d", info.State, info.Status, info.HealthMask, info.HealthSummary), ret
	})
}

// askHealth asks for the counters that health checks compare. Their values differ between two
// readings, so the answer is only whether there is one.
func askHealth(device DeviceGetters, add func(question, function string, ask func() (string, nvml.Return))) {
	add("energy consumption", "nvmlDeviceGetTotalEnergyConsumption", func() (string, nvml.Return) {
		_, ret := device.GetTotalEnergyConsumption()
		return counted, ret
	})
	add("retired pages pending", "nvmlDeviceGetRetiredPagesPendingStatus", func() (string, nvml.Return) {
		pending, ret := device.GetRetiredPagesPendingStatus()
		return fmt.Sprint(pending), ret
	})
	add("repair status", "nvmlDeviceGetRepairStatus", func() (string, nvml.Return) {
		status, ret := device.GetRepairStatus()
		return fmt.Sprintf("channel pending %d, TPC pending %d", status.BChannelRepairPending, status.BTpcRepairPending), ret
	})
	add("unrepairable memory", "nvmlDeviceGetUnrepairableMemoryFlag_v1", func() (string, nvml.Return) {
		status, ret := device.GetUnrepairableMemoryFlag_v1()
		return fmt.Sprint(status.BUnrepairableMemory), ret
	})
	add("SRAM errors", "nvmlDeviceGetSramEccErrorStatus", func() (string, nvml.Return) {
		status, ret := device.GetSramEccErrorStatus()
		return fmt.Sprintf("threshold exceeded %d, uncorrectable %d parity and %d SEC-DED, correctable %d", status.BThresholdExceeded,
			status.AggregateUncParity, status.AggregateUncSecDed, status.AggregateCor), ret
	})
	add("clock event reasons", "nvmlDeviceGetCurrentClocksEventReasons", func() (string, nvml.Return) {
		reasons, ret := device.GetCurrentClocksEventReasons()
		return fmt.Sprintf("%#x", reasons), ret
	})
	add("supported clock event reasons", "nvmlDeviceGetSupportedClocksEventReasons", func() (string, nvml.Return) {
		reasons, ret := device.GetSupportedClocksEventReasons()
		return fmt.Sprintf("%#x", reasons), ret
	})
	for _, counter := range []struct {
		name string
		kind nvml.EccCounterType
	}{{"volatile", nvml.VOLATILE_ECC}, {"aggregate", nvml.AGGREGATE_ECC}} {
		add("uncorrected ECC errors, "+counter.name, "nvmlDeviceGetTotalEccErrors", func() (string, nvml.Return) {
			_, ret := device.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, counter.kind)
			return counted, ret
		})
	}
}

// counted is the answer that a counter has a value.
const counted = "a number"

// askInstances asks for MIG devices and instances, which most GPUs do not have while MIG mode is
// off. The answer shows with which error NVML says so.
func askInstances(device DeviceGetters, add func(question, function string, ask func() (string, nvml.Return))) {
	add("most MIG devices", "nvmlDeviceGetMaxMigDeviceCount", func() (string, nvml.Return) {
		count, ret := device.GetMaxMigDeviceCount()
		return fmt.Sprint(count), ret
	})
	add("MIG device 0", "nvmlDeviceGetMigDeviceHandleByIndex", func() (string, nvml.Return) {
		_, ret := device.GetMigDeviceHandleByIndex(0)
		return "a handle", ret
	})
	add("GPU instance 0", "nvmlDeviceGetGpuInstanceById", func() (string, nvml.Return) {
		_, ret := device.GetGpuInstanceById(0)
		return "a handle", ret
	})
	info, ret := device.GetGpuInstanceProfileInfo(0)
	if ret != nvml.SUCCESS {
		return
	}
	add("GPU instances of profile 0", "nvmlDeviceGetGpuInstances", func() (string, nvml.Return) {
		instances, ret := device.GetGpuInstances(&info)
		return fmt.Sprint(len(instances)), ret
	})
	add("name of profile 0, version 2", "nvmlDeviceGetGpuInstanceProfileInfoV", func() (string, nvml.Return) {
		named, ret := device.GetGpuInstanceProfileInfoV(0).V2()
		return fmt.Sprintf("%q", text(named.Name[:])), ret
	})
	add("name of profile 0, version 3", "nvmlDeviceGetGpuInstanceProfileInfoV", func() (string, nvml.Return) {
		named, ret := device.GetGpuInstanceProfileInfoV(0).V3()
		return fmt.Sprintf("%q", text(named.Name[:])), ret
	})
}

// askProfile asks for one GPU instance profile and, if it exists, for its placements. NVML may
// answer about placements only with MIG mode on, or only a privileged process.
func askProfile(device DeviceGetters, value int, add func(question, function string, ask func() (string, nvml.Return))) {
	var info nvml.GpuInstanceProfileInfo
	ret := nvml.ERROR_TIMEOUT
	add(fmt.Sprintf("profile %d", value), "nvmlDeviceGetGpuInstanceProfileInfo", func() (string, nvml.Return) {
		info, ret = device.GetGpuInstanceProfileInfo(value)
		return fmt.Sprintf("ID %d, %d slices, %d MiB, at most %d", info.Id, info.SliceCount, info.MemorySizeMB, info.InstanceCount), ret
	})
	if ret != nvml.SUCCESS {
		return
	}
	add(fmt.Sprintf("placements of profile %d", value), "nvmlDeviceGetGpuInstancePossiblePlacements_v2", func() (string, nvml.Return) {
		placements, ret := device.GetGpuInstancePossiblePlacements(&info)
		var found []string
		for _, p := range placements {
			found = append(found, fmt.Sprintf("%d+%d", p.Start, p.Size))
		}
		slices.Sort(found)
		return fmt.Sprint(found), ret
	})
}

// patience is how long one function may take. One that hangs costs only its own answer.
const patience = 10 * time.Second

// record adds the answer of one function, or NVML's error in the words of facts.
func record(answers facts.Answers, question, function string, has func(string) bool, ask func() (string, nvml.Return)) {
	if !has(function) {
		answers[question] = facts.Answer{Error: facts.NoFunction}
		return
	}
	replies := make(chan facts.Answer, 1)
	go func() {
		value, ret := ask()
		if ret != nvml.SUCCESS {
			value = ""
		}
		replies <- facts.Answer{Value: value, Error: errorName(ret)}
	}()
	select {
	case answers[question] = <-replies:
	case <-time.After(patience):
		answers[question] = facts.Answer{Error: fmt.Sprintf("no answer within %s", patience)}
	}
}

// errorName returns the facts' name of an NVML error that says that this GPU or driver does not
// have something, and NVML's text and number for all others.
func errorName(ret nvml.Return) string {
	switch ret {
	case nvml.SUCCESS:
		return ""
	case nvml.ERROR_NOT_SUPPORTED:
		return facts.NotSupported
	case nvml.ERROR_NOT_FOUND:
		return facts.NotFound
	case nvml.ERROR_INVALID_ARGUMENT:
		return facts.InvalidArgument
	case nvml.ERROR_NO_PERMISSION:
		return facts.NoPermission
	default:
		return fmt.Sprintf("%s (%d)", ret.Error(), ret)
	}
}
