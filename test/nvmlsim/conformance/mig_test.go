package conformance

import (
	"fmt"
	"os"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// onHost adds the device nodes of the capabilities for MIG as a whole, which a process on the host
// has and a container does not.
func (w *world) onHost() *world {
	w.give("nvidia-caps/nvidia-cap1")
	w.give("nvidia-caps/nvidia-cap2")
	return w
}

func create(t *testing.T, device nvml.Device, profile, start, size uint32) nvml.GpuInstance {
	t.Helper()
	instance, ret := device.CreateGpuInstanceWithPlacement(
		&nvml.GpuInstanceProfileInfo{Id: profile},
		&nvml.GpuInstancePlacement{Start: start, Size: size},
	)
	want(t, fmt.Sprintf("create GPU instance %d at %d:%d", profile, start, size), ret, nvml.SUCCESS)
	return instance
}

func divide(t *testing.T, instance nvml.GpuInstance, profile uint32) nvml.ComputeInstance {
	t.Helper()
	compute, ret := instance.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: profile})
	want(t, fmt.Sprintf("create compute instance %d", profile), ret, nvml.SUCCESS)
	return compute
}

// migUUIDs returns the UUIDs of the MIG devices that this process sees on a GPU.
func migUUIDs(t *testing.T, device nvml.Device) []string {
	t.Helper()
	count, ret := device.GetMaxMigDeviceCount()
	want(t, "most MIG devices", ret, nvml.SUCCESS)
	var all []string
	for i := range count {
		mig, ret := device.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		want(t, "MIG device", ret, nvml.SUCCESS)
		uuid, ret := mig.GetUUID()
		want(t, "UUID of a MIG device", ret, nvml.SUCCESS)
		all = append(all, uuid)
	}
	return all
}

func TestRefusedInstanceGivesReason(t *testing.T) {
	newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	place := func(profile, start, size uint32) nvml.Return {
		_, ret := device.CreateGpuInstanceWithPlacement(
			&nvml.GpuInstanceProfileInfo{Id: profile},
			&nvml.GpuInstancePlacement{Start: start, Size: size},
		)
		return ret
	}
	want(t, "with MIG off", place(19, 0, 1), nvml.ERROR_NOT_SUPPORTED)
	setMode(t, device, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS, nvml.SUCCESS)
	want(t, "an unknown profile", place(77, 0, 1), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "where none can start", place(14, 1, 2), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "of another size", place(14, 0, 4), nvml.ERROR_INVALID_ARGUMENT)
	instance := create(t, device, 9, 0, 4)
	want(t, "an overlap", place(14, 2, 2), nvml.ERROR_INSUFFICIENT_RESOURCES)
	_, ret := instance.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: 4})
	want(t, "a compute instance of 7 slices in 3", ret, nvml.ERROR_INVALID_ARGUMENT)
	compute := divide(t, instance, 2)
	_, ret = instance.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: 0})
	want(t, "a compute instance too many", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	want(t, "destroy a GPU instance that is divided", instance.Destroy(), nvml.ERROR_IN_USE)
	want(t, "destroy", compute.Destroy(), nvml.SUCCESS)
	want(t, "destroy once more", compute.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "destroy", instance.Destroy(), nvml.SUCCESS)
	want(t, "destroy once more", instance.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	_, ret = device.GetGpuInstanceById(1)
	want(t, "by ID, gone", ret, nvml.ERROR_NOT_FOUND)
}

// A compute instance with a running process must not be destroyed. Idle compute instances next to
// it can be.
func TestBusyComputeInstanceIsNotDestroyed(t *testing.T) {
	w := newWorld(t, inMIG(t, "h100-sxm5-80gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	instance := create(t, device, 9, 4, 4)
	busy, idle := divide(t, instance, 0), divide(t, instance, 0)
	w.must(w.state.SetBusy(0, state.Process{PID: 4711, InInstance: true, Instance: 2, Compute: 0}))
	want(t, "destroy a busy one", busy.Destroy(), nvml.ERROR_IN_USE)
	want(t, "destroy an idle one", idle.Destroy(), nvml.SUCCESS)
	mig, ret := device.GetMigDeviceHandleByIndex(0)
	want(t, "MIG device", ret, nvml.SUCCESS)
	processes, ret := mig.GetComputeRunningProcesses()
	want(t, "its processes", ret, nvml.SUCCESS)
	if len(processes) != 1 || processes[0].Pid != 4711 || processes[0].GpuInstanceId != 2 || processes[0].ComputeInstanceId != 0 {
		t.Errorf("processes %v", processes)
	}
	w.must(w.state.ClearBusy(0))
	want(t, "destroy it when idle", busy.Destroy(), nvml.SUCCESS)
}

// For each GPU instance profile of each model, the compute instance profiles and the attributes of
// the MIG device that fills the GPU instance must agree with the model file.
func TestMIGDeviceAttributes(t *testing.T) {
	needSimulator(t)
	for key, m := range migModels(t) {
		t.Run(key, func(t *testing.T) {
			w := newWorld(t, inMIG(t, key, 1)).onHost()
			library := initialize(t)
			device := devices(t, library)[0]
			for _, p := range m.MIG.Profiles {
				instance := create(t, device, p.ID, p.Placements.Starts[0], p.Placements.Size)
				info, ret := instance.GetInfo()
				want(t, "GPU instance", ret, nvml.SUCCESS)
				if info.ProfileId != p.ID || info.Placement.Start != p.Placements.Starts[0] || info.Placement.Size != p.Placements.Size {
					t.Errorf("%s: %+v", p.Name, info)
				}
				byID, ret := device.GetGpuInstanceById(int(info.Id))
				want(t, "by ID", ret, nvml.SUCCESS)
				if again, _ := byID.GetInfo(); again != info {
					t.Errorf("by ID %+v, want %+v", again, info)
				}
				checkWhole(t, w, library, device, instance, info, p, m)
				want(t, "destroy", instance.Destroy(), nvml.SUCCESS)
			}
		})
	}
}

func checkWhole(
	t *testing.T,
	w *world,
	library nvml.Interface,
	device nvml.Device,
	gi nvml.GpuInstance,
	info nvml.GpuInstanceInfo,
	p model.Profile,
	m *model.GPU,
) {
	t.Helper()
	filled := 0
	for value := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		profile, ret := gi.GetComputeInstanceProfileInfo(value, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		want(t, "compute instance profile", ret, nvml.SUCCESS)
		named, ret := gi.GetComputeInstanceProfileInfoV(value, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED).V2()
		want(t, "compute instance profile, version 2", ret, nvml.SUCCESS)
		if named.Id != profile.Id || named.SliceCount != profile.SliceCount {
			t.Errorf("%s: %+v and %+v", p.Name, named, profile)
		}
		left, ret := gi.GetComputeInstanceRemainingCapacity(&profile)
		want(t, "remaining capacity", ret, nvml.SUCCESS)
		if left != int(profile.InstanceCount) {
			t.Errorf("%s: %d of profile %d fit, its maximum is %d", p.Name, left, profile.Id, profile.InstanceCount)
		}
		if profile.SliceCount != p.Slices {
			continue
		}
		filled++
		if text(named.Name[:]) != p.Name || profile.MultiprocessorCount != p.SM {
			t.Errorf("%s: whole compute instance %q with %d SM", p.Name, text(named.Name[:]), profile.MultiprocessorCount)
		}
		checkDevice(t, w, library, device, divide(t, gi, profile.Id), info.Id, p, m)
	}
	if filled != 1 {
		t.Errorf("%s: %d compute instance profiles fill it, want 1", p.Name, filled)
	}
}

// checkDevice fails the test unless the MIG device of compute instance ci, which fills its GPU
// instance, has the values of the model file. At the end it destroys ci.
func checkDevice(
	t *testing.T,
	w *world,
	library nvml.Interface,
	device nvml.Device,
	ci nvml.ComputeInstance,
	gi uint32,
	p model.Profile,
	m *model.GPU,
) {
	t.Helper()
	info, ret := ci.GetInfo()
	want(t, "compute instance", ret, nvml.SUCCESS)
	uuids := migUUIDs(t, device)
	if expected := w.state.GPU(0).MIGUUID(gi, info.Id); len(uuids) != 1 || uuids[0] != expected {
		t.Fatalf("%s: MIG devices %v, want %s", p.Name, uuids, expected)
	}
	mig, ret := library.DeviceGetHandleByUUID(uuids[0])
	want(t, "by UUID", ret, nvml.SUCCESS)
	is, ret := mig.IsMigDeviceHandle()
	want(t, "is a MIG device", ret, nvml.SUCCESS)
	itsGI, ret := mig.GetGpuInstanceId()
	want(t, "GPU instance ID", ret, nvml.SUCCESS)
	itsCI, ret := mig.GetComputeInstanceId()
	want(t, "compute instance ID", ret, nvml.SUCCESS)
	name, ret := mig.GetName()
	want(t, "name", ret, nvml.SUCCESS)
	memory, ret := mig.GetMemoryInfo()
	want(t, "memory", ret, nvml.SUCCESS)
	attributes, ret := mig.GetAttributes()
	want(t, "attributes", ret, nvml.SUCCESS)
	parent, ret := mig.GetDeviceHandleFromMigDeviceHandle()
	want(t, "parent", ret, nvml.SUCCESS)
	parentUUID, _ := parent.GetUUID()
	if !is || itsGI != int(gi) || itsCI != int(info.Id) || name != m.ProductName.Value+" "+p.Name || memory.Total>>20 != p.MemoryMiB ||
		attributes.MultiprocessorCount != p.SM || attributes.GpuInstanceSliceCount != p.Slices || attributes.MemorySizeMB != p.MemoryMiB ||
		attributes.SharedDecoderCount != p.Decoders || parentUUID != state.Text(w.state.GPU(0).UUID[:]) {
		t.Errorf("%s: %t, %d/%d, %q, %d MiB, %+v, parent %s", p.Name, is, itsGI, itsCI, name, memory.Total>>20, attributes, parentUUID)
	}
	want(t, "destroy", ci.Destroy(), nvml.SUCCESS)
	_, ret = mig.GetUUID()
	want(t, "UUID of a device that is gone", ret, nvml.ERROR_INVALID_ARGUMENT)
}

// A new GPU instance at the placement of a destroyed one must get the same ID, and so its MIG
// device the same UUID. At another placement both must differ.
func TestIDsAreReused(t *testing.T) {
	newWorld(t, inMIG(t, "h100-sxm5-80gb", 2)).onHost()
	all := devices(t, initialize(t))
	cut := func(device nvml.Device, start uint32) string {
		instance := create(t, device, 19, start, 1)
		compute := divide(t, instance, 0)
		uuids := migUUIDs(t, device)
		want(t, "destroy", compute.Destroy(), nvml.SUCCESS)
		want(t, "destroy", instance.Destroy(), nvml.SUCCESS)
		return uuids[0]
	}
	first, elsewhere, again, other := cut(all[0], 2), cut(all[0], 3), cut(all[0], 2), cut(all[1], 2)
	if first != again || first == elsewhere || first == other {
		t.Errorf("UUIDs at 2, 3, 2 and on another GPU at 2: %s, %s, %s, %s", first, elsewhere, again, other)
	}
}

func TestVGPUGuestCannotCreateInstances(t *testing.T) {
	w := newWorld(t, readNode(t, "vgpu-guest")).onHost()
	device := devices(t, initialize(t))[0]
	mode, ret := device.GetVirtualizationMode()
	want(t, "virtualization mode", ret, nvml.SUCCESS)
	if mode != nvml.GPU_VIRTUALIZATION_MODE_VGPU {
		t.Errorf("virtualization mode %d", mode)
	}
	setMode(t, device, nvml.DEVICE_MIG_DISABLE, nvml.ERROR_NO_PERMISSION, nvml.SUCCESS)
	_, ret = device.CreateGpuInstance(&nvml.GpuInstanceProfileInfo{Id: 19})
	want(t, "create", ret, nvml.ERROR_NOT_SUPPORTED)
	instance, ret := device.GetGpuInstanceById(1)
	want(t, "the host's instance", ret, nvml.SUCCESS)
	want(t, "destroy", instance.Destroy(), nvml.ERROR_NOT_SUPPORTED)
	w.must(w.state.Load("", "", true))
	if left := w.state.GPU(0).GPUInstances(); len(left) != 1 {
		t.Errorf("after a reload of the guest's driver: %v", left)
	}
}

// A container must see a MIG device only if it has the capability device nodes of both the GPU
// instance and the compute instance.
func TestContainerSeesInstancesOfItsCapabilities(t *testing.T) {
	w := newWorld(t, readNode(t, "static-mig"))
	device := devices(t, initialize(t))[0]
	gpu := w.state.GPU(0)
	expect := func(uuids ...string) {
		t.Helper()
		if got := migUUIDs(t, device); fmt.Sprint(got) != fmt.Sprint(uuids) {
			t.Errorf("MIG devices %v, want %v", got, uuids)
		}
	}
	expect()
	w.give(fmt.Sprintf("nvidia-caps/nvidia-cap%d", gpu.GPUInstanceMinor(5)))
	expect()
	w.give(fmt.Sprintf("nvidia-caps/nvidia-cap%d", gpu.ComputeInstanceMinor(5, 0)))
	expect(gpu.MIGUUID(5, 0))
	_, ret := device.GetGpuInstanceById(1)
	want(t, "another's GPU instance", ret, nvml.ERROR_NOT_FOUND)
	w.must(os.RemoveAll(w.dev + "/nvidia-caps"))
	w.onHost()
	expect(gpu.MIGUUID(1, 0), gpu.MIGUUID(1, 1), gpu.MIGUUID(5, 0))
}

// With a read-only state file, as in a container, NVML must still hide the MIG devices whose
// capability device nodes are missing, and creating a MIG instance must fail.
func TestContainerCannotCreateInstances(t *testing.T) {
	w := newWorld(t, readNode(t, "static-mig"))
	gpu := w.state.GPU(0)
	w.give(fmt.Sprintf("nvidia-caps/nvidia-cap%d", gpu.GPUInstanceMinor(1)))
	w.give(fmt.Sprintf("nvidia-caps/nvidia-cap%d", gpu.ComputeInstanceMinor(1, 1)))
	w.must(os.Chmod(w.state.Path(), 0o444))
	p := start(t, "mig-without-rights")
	p.expect(gpu.MIGUUID(1, 1))
	p.expect("all")
	p = start(t, "cut-without-rights")
	p.expect(fmt.Sprintf("mode %d 0", nvml.ERROR_NO_PERMISSION))
	p.expect(fmt.Sprintf("instance %d", nvml.ERROR_NO_PERMISSION))
}
