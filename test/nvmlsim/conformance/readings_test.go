package conformance

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The library must also return values that the plugin, its libraries and nvidia-smi read but that
// no model file contains.
func TestReadings(t *testing.T) {
	newWorld(t, readNode(t, "gb200-tray"))
	library := initialize(t)
	all := devices(t, library)
	device := all[1]
	is := func(what string, got any, ret nvml.Return, wanted any) {
		t.Helper()
		if ret != nvml.SUCCESS || got != wanted {
			t.Errorf("%s: %v (%v), want %v", what, got, ret, wanted)
		}
	}
	module, ret := device.GetModuleId()
	is("module", module, ret, 2)
	mode, ret := device.GetVirtualizationMode()
	is("virtualization mode", mode, ret, nvml.GPU_VIRTUALIZATION_MODE_NONE)
	addressing, ret := device.GetAddressingMode()
	is("addressing mode", addressing.Value, ret, uint32(nvml.DEVICE_ADDRESSING_MODE_ATS))
	cores, ret := device.GetNumGpuCores()
	is("cores", cores, ret, 152*128)
	limit, ret := device.GetEnforcedPowerLimit()
	is("power limit", limit, ret, uint32(1200000))
	current, pending, ret := device.GetEccMode()
	is("ECC mode", [2]nvml.EnableState{current, pending}, ret, [2]nvml.EnableState{nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED})
	pci, ret := device.GetPciInfoExt()
	is("PCI domain", pci.Domain, ret, uint32(9))
	fabric, ret := device.GetGpuFabricInfoV().V2()
	is("fabric clique", fabric.CliqueId, ret, uint32(32766))
	is("fabric cluster", fabric.ClusterUuid[0], ret, uint8(0x11))
	latest, ret := device.GetGpuFabricInfoV().V3()
	is("fabric state", latest.State, ret, uint8(nvml.GPU_FABRIC_STATE_COMPLETED))
	processes, ret := device.GetComputeRunningProcesses()
	is("processes", len(processes), ret, 0)
	level, ret := library.DeviceGetTopologyCommonAncestor(all[0], all[1])
	is("nearness of two GPUs of a socket", level, ret, nvml.TOPOLOGY_NODE)
	level, ret = library.DeviceGetTopologyCommonAncestor(all[0], all[2])
	is("nearness of GPUs of two sockets", level, ret, nvml.TOPOLOGY_SYSTEM)
	version, ret := library.SystemGetNVMLVersion()
	is("NVML version", version, ret, "13.590.48.01")
	instances, ret := device.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: 19, InstanceCount: 7})
	is("GPU instances while MIG is off", len(instances), ret, 0)
	_, ret = device.GetMigDeviceHandleByIndex(0)
	want(t, "first MIG device", ret, nvml.ERROR_NOT_FOUND)
	_, ret = device.CreateGpuInstance(&nvml.GpuInstanceProfileInfo{Id: 19})
	want(t, "make a GPU instance", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = device.GetSerial()
	want(t, "serial that the node file does not give", ret, nvml.ERROR_NOT_SUPPORTED)
}

// The addressing mode must be the model file's, or None if the model file gives none. An injected
// fault must make the query fail.
func TestAddressingModes(t *testing.T) {
	for node, wanted := range map[string]nvml.DeviceAddressingModeType{
		"gb200-tray": nvml.DEVICE_ADDRESSING_MODE_ATS, "l40s-x2": nvml.DEVICE_ADDRESSING_MODE_NONE, "dgx-h100": nvml.DEVICE_ADDRESSING_MODE_NONE,
	} {
		t.Run(node, func(t *testing.T) {
			w := newWorld(t, readNode(t, node))
			all := devices(t, initialize(t))
			mode, ret := all[0].GetAddressingMode()
			if want(t, "addressing mode", ret, nvml.SUCCESS); mode.Value != uint32(wanted) {
				t.Errorf("addressing mode %d, want %d", mode.Value, wanted)
			}
			w.must(
				w.state.AddFault(state.Fault{Kind: state.FaultFail, GPU: 1, Error: uint32(nvml.ERROR_NOT_SUPPORTED)}, "nvmlDeviceGetAddressingMode", 0),
			)
			_, ret = all[0].GetAddressingMode()
			want(t, "a GPU without the fault", ret, nvml.SUCCESS)
			_, ret = all[1].GetAddressingMode()
			want(t, "a GPU with the fault", ret, nvml.ERROR_NOT_SUPPORTED)
		})
	}
}

// All MIG functions must return NOT_SUPPORTED for a GPU whose model has no MIG.
func TestGPUWithoutMIG(t *testing.T) {
	newWorld(t, readNode(t, "t4-x1"))
	device := devices(t, initialize(t))[0]
	_, _, ret := device.GetMigMode()
	want(t, "MIG mode", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = device.GetMigDeviceHandleByIndex(0)
	want(t, "MIG device", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = device.GetGpuInstanceProfileInfo(0)
	want(t, "profile", ret, nvml.ERROR_NOT_SUPPORTED)
}

// Invalid arguments must be refused with the error that NVML documents for each.
func TestBadArguments(t *testing.T) {
	newWorld(t, readNode(t, "l40s-x2"))
	library := initialize(t)
	_, ret := library.DeviceGetHandleByIndex(-1)
	want(t, "index -1", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = library.DeviceGetHandleByPciBusId("nowhere")
	want(t, "an address that is none", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = library.DeviceGetHandleByPciBusId("0000:00:00.0")
	want(t, "an address without a GPU", ret, nvml.ERROR_NOT_FOUND)
	_, ret = library.DeviceGetHandleByUUID("GPU-none")
	want(t, "a UUID that is none", ret, nvml.ERROR_NOT_FOUND)
	device := devices(t, library)[0]
	_, ret = device.GetGpuInstanceProfileInfo(99)
	want(t, "a profile beyond the last", ret, nvml.ERROR_INVALID_ARGUMENT)
	want(t, "events that are not supported", device.RegisterEvents(nvml.EventTypePState, newSet(t, library)), nvml.ERROR_NOT_SUPPORTED)
}

func newSet(t *testing.T, library nvml.Interface) nvml.EventSet {
	t.Helper()
	set, ret := library.EventSetCreate()
	want(t, "create event set", ret, nvml.SUCCESS)
	t.Cleanup(func() { _ = set.Free() })
	return set
}
