package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func expectMode(t *testing.T, device nvml.Device, current, pending int) {
	t.Helper()
	now, later, ret := device.GetMigMode()
	want(t, "MIG mode", ret, nvml.SUCCESS)
	if now != current || later != pending {
		t.Errorf("MIG mode %d, pending %d; want %d, pending %d", now, later, current, pending)
	}
}

// setMode sets the MIG mode. It fails the test unless the call returns ret and, if the call
// succeeds, the activation status is activation.
func setMode(t *testing.T, device nvml.Device, mode int, ret, activation nvml.Return) {
	t.Helper()
	activated, got := device.SetMigMode(mode)
	want(t, fmt.Sprintf("set MIG mode %d", mode), got, ret)
	if got == nvml.SUCCESS {
		want(t, fmt.Sprintf("activation of MIG mode %d", mode), activated, activation)
	}
}

func TestModeChangeImmediateOrPending(t *testing.T) {
	needSimulator(t)
	for key, m := range migModels(t) {
		t.Run(key, func(t *testing.T) {
			w := newWorld(t, manyOf(t, key, 1)).onHost()
			device := devices(t, initialize(t))[0]
			expectMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_DISABLE)
			if m.MIG.NeedsReset.Value {
				setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED)
				expectMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_ENABLE)
				w.must(w.state.Reset(0, false))
			} else {
				setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
			}
			expectMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE)

			profile := m.MIG.Profiles[0]
			instance := create(t, device, profile.ID, profile.Placements.Starts[0], profile.Placements.Size)
			setMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.ERROR_IN_USE, nvml.ERROR_IN_USE)
			expectMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE)
			want(t, "destroy", instance.Destroy(), nvml.SUCCESS)

			// A reset must remove all MIG instances. It must keep MIG mode only on models that need a reset
			// to change the mode.
			create(t, device, profile.ID, profile.Placements.Starts[0], profile.Placements.Size)
			w.must(w.state.Reset(0, false))
			kept := nvml.DEVICE_MIG_DISABLE
			if m.MIG.NeedsReset.Value {
				kept = nvml.DEVICE_MIG_ENABLE
			}
			expectMode(t, device, kept, kept)
			if left := w.state.GPU(0).GPUInstances(); len(left) > 0 {
				t.Errorf("%v after a reset", left)
			}
		})
	}
}

func TestGPUInUseKeepsMode(t *testing.T) {
	w := newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	w.must(w.state.SetBusy(0, state.Process{PID: 4711}, state.Process{PID: 4712}))
	processes, ret := device.GetComputeRunningProcesses()
	want(t, "processes", ret, nvml.SUCCESS)
	if len(processes) != 2 || processes[0].Pid != 4711 || processes[1].Pid != 4712 || processes[0].GpuInstanceId != ^uint32(0) {
		t.Errorf("processes %v", processes)
	}
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.ERROR_IN_USE)
	expectMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_ENABLE)
	w.must(w.state.ClearBusy(0))
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	expectMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE)
}

func TestModeChangeWithoutMIGFails(t *testing.T) {
	newWorld(t, manyOf(t, "l40s-48gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.ERROR_NOT_SUPPORTED, nvml.SUCCESS)
	_, ret := device.CreateGpuInstance(&nvml.GpuInstanceProfileInfo{Id: 19})
	want(t, "create", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = device.GetMigDeviceHandleByIndex(0)
	want(t, "MIG device", ret, nvml.ERROR_NOT_SUPPORTED)
}

// After a GPU has left MIG mode, its NVLink fabric registration must be "in progress" for a while
// before it is "completed".
func TestLeavingMIGRejoinsTheFabric(t *testing.T) {
	w := newWorld(t, readNode(t, "dgx-h100")).onHost()
	w.must(w.state.SetFabricSettle(time.Hour))
	device := devices(t, initialize(t))[0]
	fabric := func(wanted uint8) {
		t.Helper()
		info, ret := device.GetGpuFabricInfo()
		want(t, "fabric", ret, nvml.SUCCESS)
		if info.State != wanted {
			t.Errorf("fabric state %d, want %d", info.State, wanted)
		}
	}
	fabric(nvml.GPU_FABRIC_STATE_COMPLETED)
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	setMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.SUCCESS, nvml.SUCCESS)
	fabric(nvml.GPU_FABRIC_STATE_IN_PROGRESS)
	w.must(w.state.SetFabric(0, nvml.GPU_FABRIC_STATE_COMPLETED, 0))
	fabric(nvml.GPU_FABRIC_STATE_COMPLETED)
}
