package nvidia

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

// fakeMIG is the MIG part of a fake card. The card's memory has eight slices. The capability files
// of its MIG instances are in the fake host's /proc.
type fakeMIG struct {
	host           fakeHost
	minor          int
	gpu            string // the UUID
	on, next       bool
	needsReset     bool // to change the mode
	activation     nvml.Return
	misplaces      bool // creates instances at a wrong placement
	noCapabilities bool // creates no capability files
	profiles       []fakeProfile
	processes      []nvml.ProcessInfo

	mu        sync.Mutex
	instances map[uint32]*fakeInstance
	calls     []string // those that change something
	// answers are return codes by NVML function. A function in answers returns this code and changes
	// nothing. A function in after makes its change first and then returns the code. Each code is used
	// once.
	answers, after map[string]nvml.Return
}

type fakeProfile struct {
	nvml.GpuInstanceProfileInfo
	size   uint32
	starts []uint32
}

type fakeInstance struct {
	nvml.GpuInstanceInfo
	compute map[uint32]uint32 // profile by ID
}

// newFakeMIG returns a fake card with a large and a small MIG profile, like those of an H100.
func newFakeMIG(h fakeHost, minor int) *fakeMIG {
	return &fakeMIG{
		host: h, minor: minor, gpu: fmt.Sprintf("GPU-%d", minor), instances: map[uint32]*fakeInstance{},
		answers: map[string]nvml.Return{}, after: map[string]nvml.Return{},
		profiles: []fakeProfile{
			{nvml.GpuInstanceProfileInfo{Id: 19, SliceCount: 1, InstanceCount: 7, MultiprocessorCount: 16, CopyEngineCount: 1, MemorySizeMB: 9984},
				1, []uint32{0, 1, 2, 3, 4, 5, 6}},
			{},
			{nvml.GpuInstanceProfileInfo{Id: 9, SliceCount: 3, InstanceCount: 2, MultiprocessorCount: 60, CopyEngineCount: 3, MemorySizeMB: 40448},
				4, []uint32{4, 0}},
		},
	}
}

// say returns the return code that answers has for a function, SUCCESS by default. It removes the
// code from answers.
func say(answers map[string]nvml.Return, function string) nvml.Return {
	ret := answers[function]
	delete(answers, function)
	return ret
}

// change calls do, which makes the change of a fake NVML function. If answers has an error for the
// function, change returns that error instead.
func (f *fakeMIG) change(function string, do func() nvml.Return) nvml.Return {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, function)
	if ret := say(f.answers, function); ret != nvml.SUCCESS {
		return ret
	}
	if ret := do(); ret != nvml.SUCCESS {
		return ret
	}
	return say(f.after, function)
}

// ask calls read, which returns the result of a fake NVML function. If answers has an error for the
// function, ask returns that error instead.
func ask[T any](f *fakeMIG, function string, read func() (T, nvml.Return)) (T, nvml.Return) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ret := say(f.answers, function); ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return read()
}

func (f *fakeMIG) folder(instance uint32) string {
	return fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", f.minor, instance)
}

// install replaces the MIG functions of the mock device with those of this fake card.
func (f *fakeMIG) install(d *mock.Device) {
	d.GetMigModeFunc = func() (int, int, nvml.Return) {
		modes, ret := ask(f, "nvmlDeviceGetMigMode",
			func() ([2]int, nvml.Return) { return [2]int{modeNumber(f.on), modeNumber(f.next)}, nvml.SUCCESS })
		return modes[0], modes[1], ret
	}
	d.SetMigModeFunc = func(mode int) (nvml.Return, nvml.Return) {
		activation := f.activation
		ret := f.change(fmt.Sprintf("nvmlDeviceSetMigMode %d", mode), func() nvml.Return {
			if len(f.instances) > 0 && mode == nvml.DEVICE_MIG_DISABLE {
				return nvml.ERROR_IN_USE
			}
			f.next = mode == nvml.DEVICE_MIG_ENABLE
			if f.needsReset {
				activation = nvml.ERROR_RESET_REQUIRED
			}
			if activation == nvml.SUCCESS {
				f.on = f.next
			}
			return nvml.SUCCESS
		})
		return activation, ret
	}
	d.GetGpuInstanceProfileInfoFunc = func(i int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstanceProfileInfo", func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
			if i >= len(f.profiles) {
				return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
			}
			if f.profiles[i].size == 0 {
				return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
			}
			return f.profiles[i].GpuInstanceProfileInfo, nvml.SUCCESS
		})
	}
	d.GetGpuInstancePossiblePlacementsFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstancePossiblePlacements", func() ([]nvml.GpuInstancePlacement, nvml.Return) {
			p := f.profile(info.Id)
			var places []nvml.GpuInstancePlacement
			for _, start := range p.starts {
				places = append(places, nvml.GpuInstancePlacement{Start: start, Size: p.size})
			}
			return places, nvml.SUCCESS
		})
	}
	d.GetGpuInstancesFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstances", func() ([]nvml.GpuInstance, nvml.Return) {
			var handles []nvml.GpuInstance
			for _, id := range slices.Sorted(maps.Keys(f.instances)) {
				if f.instances[id].ProfileId == info.Id {
					handles = append(handles, f.handle(id))
				}
			}
			return handles, nvml.SUCCESS
		})
	}
	d.GetGpuInstanceByIdFunc = func(id int) (nvml.GpuInstance, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstanceById", func() (nvml.GpuInstance, nvml.Return) {
			if f.instances[uint32(id)] == nil {
				return nil, nvml.ERROR_NOT_FOUND
			}
			return f.handle(uint32(id)), nvml.SUCCESS
		})
	}
	d.CreateGpuInstanceWithPlacementFunc = func(
		info *nvml.GpuInstanceProfileInfo, at *nvml.GpuInstancePlacement,
	) (nvml.GpuInstance, nvml.Return) {
		var handle nvml.GpuInstance
		ret := f.change("nvmlDeviceCreateGpuInstanceWithPlacement", func() nvml.Return {
			if !f.on {
				return nvml.ERROR_NOT_SUPPORTED
			}
			for _, i := range f.instances {
				if i.Placement.Start < at.Start+at.Size && at.Start < i.Placement.Start+i.Placement.Size {
					return nvml.ERROR_INSUFFICIENT_RESOURCES
				}
			}
			handle = f.handle(f.add(info.Id, *at))
			return nvml.SUCCESS
		})
		return handle, ret
	}
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) {
		return ask(f, "nvmlDeviceGetMaxMigDeviceCount", func() (int, nvml.Return) { return 7, nvml.SUCCESS })
	}
	d.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		return ask(f, "nvmlDeviceGetMigDeviceHandleByIndex", func() (nvml.Device, nvml.Return) {
			if devices := f.devices(); i < len(devices) {
				return devices[i], nvml.SUCCESS
			}
			return nil, nvml.ERROR_NOT_FOUND
		})
	}
	running := func() ([]nvml.ProcessInfo, nvml.Return) { return f.processes, nvml.SUCCESS }
	none := func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
	d.GetComputeRunningProcessesFunc, d.GetGraphicsRunningProcessesFunc, d.GetMPSComputeRunningProcessesFunc = running, running, none
}

func (f *fakeMIG) profile(id uint32) fakeProfile {
	for _, p := range f.profiles {
		if p.Id == id && p.size > 0 {
			return p
		}
	}
	return fakeProfile{}
}

// add creates a GPU instance on the fake card, as the driver or an admin would.
func (f *fakeMIG) add(profile uint32, at nvml.GpuInstancePlacement) uint32 {
	id := uint32(1)
	for f.instances[id] != nil {
		id++
	}
	if f.misplaces {
		at.Start++
	}
	f.instances[id] = &fakeInstance{nvml.GpuInstanceInfo{Id: id, ProfileId: profile, Placement: at}, map[uint32]uint32{}}
	if f.noCapabilities {
		return id
	}
	f.host.file(f.folder(id)+"/access", fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", f.capability(id)))
	return id
}

func (f *fakeMIG) capability(instance uint32) int { return 3 + 135*f.minor + 9*int(instance) }

// addCompute creates a compute instance on the fake card.
func (f *fakeMIG) addCompute(instance, profile uint32) uint32 {
	i := f.instances[instance]
	id := uint32(len(i.compute))
	i.compute[id] = profile
	if f.noCapabilities {
		return id
	}
	f.host.file(fmt.Sprintf("%s/ci%d/access", f.folder(instance), id),
		fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", f.capability(instance)+1+int(id)))
	return id
}

func (f *fakeMIG) uuid(instance, compute uint32) string {
	return fmt.Sprintf("MIG-%s-%d-%d", f.gpu, instance, compute)
}

func (f *fakeMIG) devices() []nvml.Device {
	var devices []nvml.Device
	for _, id := range slices.Sorted(maps.Keys(f.instances)) {
		for _, compute := range slices.Sorted(maps.Keys(f.instances[id].compute)) {
			devices = append(devices, &mock.Device{
				GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return int(id), nvml.SUCCESS },
				GetComputeInstanceIdFunc: func() (int, nvml.Return) { return int(compute), nvml.SUCCESS },
				GetUUIDFunc:              func() (string, nvml.Return) { return f.uuid(id, compute), nvml.SUCCESS },
			})
		}
	}
	return devices
}

// handle returns a fake NVML handle of a GPU instance. It can still be used after the GPU instance
// was destroyed.
func (f *fakeMIG) handle(id uint32) nvml.GpuInstance {
	return &mock.GpuInstance{
		GetInfoFunc: func() (nvml.GpuInstanceInfo, nvml.Return) {
			return ask(f, "nvmlGpuInstanceGetInfo", func() (nvml.GpuInstanceInfo, nvml.Return) {
				if f.instances[id] == nil {
					return nvml.GpuInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				return f.instances[id].GpuInstanceInfo, nvml.SUCCESS
			})
		},
		GetComputeInstanceProfileInfoFunc: func(profile, _ int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			return ask(f, "nvmlGpuInstanceGetComputeInstanceProfileInfo", func() (nvml.ComputeInstanceProfileInfo, nvml.Return) {
				i := f.instances[id]
				if i == nil || profile > 8 || uint32(profile+1) > f.profile(i.ProfileId).SliceCount &&
					profile != nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 {
					return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
				}
				if profile == nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 {
					return nvml.ComputeInstanceProfileInfo{Id: 7, SliceCount: 1, InstanceCount: 1, MultiprocessorCount: 26}, nvml.SUCCESS
				}
				n := uint32(profile + 1)
				return nvml.ComputeInstanceProfileInfo{Id: uint32(profile), SliceCount: n, InstanceCount: cmp.Or(3/n, 1),
					MultiprocessorCount: 16 * n}, nvml.SUCCESS
			})
		},
		GetComputeInstancesFunc: func(info *nvml.ComputeInstanceProfileInfo) ([]nvml.ComputeInstance, nvml.Return) {
			return ask(f, "nvmlGpuInstanceGetComputeInstances", func() ([]nvml.ComputeInstance, nvml.Return) {
				var handles []nvml.ComputeInstance
				if i := f.instances[id]; i != nil {
					for _, compute := range slices.Sorted(maps.Keys(i.compute)) {
						if i.compute[compute] == info.Id {
							handles = append(handles, f.computeHandle(id, compute))
						}
					}
				}
				return handles, nvml.SUCCESS
			})
		},
		GetComputeInstanceByIdFunc: func(compute int) (nvml.ComputeInstance, nvml.Return) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if i := f.instances[id]; i != nil {
				if _, ok := i.compute[uint32(compute)]; ok {
					return f.computeHandle(id, uint32(compute)), nvml.SUCCESS
				}
			}
			return nil, nvml.ERROR_NOT_FOUND
		},
		CreateComputeInstanceFunc: func(info *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
			var handle nvml.ComputeInstance
			ret := f.change("nvmlGpuInstanceCreateComputeInstance", func() nvml.Return {
				handle = f.computeHandle(id, f.addCompute(id, info.Id))
				return nvml.SUCCESS
			})
			return handle, ret
		},
		DestroyFunc: func() nvml.Return {
			return f.change("nvmlGpuInstanceDestroy", func() nvml.Return {
				i := f.instances[id]
				if i == nil {
					return nvml.ERROR_NOT_FOUND
				}
				if len(i.compute) > 0 {
					return nvml.ERROR_IN_USE
				}
				delete(f.instances, id)
				f.host.remove(f.folder(id))
				return nvml.SUCCESS
			})
		},
	}
}

func (f *fakeMIG) computeHandle(instance, compute uint32) nvml.ComputeInstance {
	return &mock.ComputeInstance{
		GetInfoFunc: func() (nvml.ComputeInstanceInfo, nvml.Return) {
			return ask(f, "nvmlComputeInstanceGetInfo", func() (nvml.ComputeInstanceInfo, nvml.Return) {
				i := f.instances[instance]
				if i == nil {
					return nvml.ComputeInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				profile, ok := i.compute[compute]
				if !ok {
					return nvml.ComputeInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				return nvml.ComputeInstanceInfo{Id: compute, ProfileId: profile,
					Placement: nvml.ComputeInstancePlacement{Start: compute, Size: 1}}, nvml.SUCCESS
			})
		},
		DestroyFunc: func() nvml.Return {
			return f.change("nvmlComputeInstanceDestroy", func() nvml.Return {
				i := f.instances[instance]
				if i == nil {
					return nvml.ERROR_NOT_FOUND
				}
				delete(i.compute, compute)
				f.host.remove(fmt.Sprintf("%s/ci%d", f.folder(instance), compute))
				return nvml.SUCCESS
			})
		},
	}
}

func (f *fakeMIG) partition(t *testing.T, profile, start, size uint32, compute ...uint32) uint32 {
	t.Helper()
	f.on, f.next = true, true
	id := f.add(profile, nvml.GpuInstancePlacement{Start: start, Size: size})
	for _, c := range compute {
		f.addCompute(id, c)
	}
	return id
}
