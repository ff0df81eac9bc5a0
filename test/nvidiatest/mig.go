package nvidiatest

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

// MIG is the MIG part of a fake card. The card's memory has eight slices. The capability files
// of its MIG instances are in the fake host's /proc.
type MIG struct {
	Host           Host
	minor          int
	gpu            string // the UUID
	On, Next       bool
	NeedsReset     bool // to change the mode
	Activation     nvml.Return
	Misplaces      bool // creates instances at a wrong placement
	NoCapabilities bool // creates no capability files
	Profiles       []Profile

	mu        sync.Mutex
	Instances map[uint32]*Instance
	Calls     []string // those that change something
	// Answers are return codes by NVML function. A function in answers returns this code and
	// changes nothing. A function in after makes its change first and then returns the code. Each
	// code is used once.
	Answers, After map[string]nvml.Return
}

// Profile is a GPU instance profile with its placements.
type Profile struct {
	nvml.GpuInstanceProfileInfo
	Size   uint32
	Starts []uint32
	// Growing makes each placement larger than the one before, which no known profile does.
	Growing bool
}

// Instance is a GPU instance of a fake card.
type Instance struct {
	nvml.GpuInstanceInfo
	Compute map[uint32]uint32 // profile by ID
}

// NewMIG returns a fake card with a large and a small MIG profile, like those of an H100.
func NewMIG(h Host, minor int) *MIG {
	return &MIG{
		Host: h, minor: minor, gpu: fmt.Sprintf("GPU-%d", minor), Instances: map[uint32]*Instance{},
		Answers: map[string]nvml.Return{}, After: map[string]nvml.Return{},
		Profiles: []Profile{
			{nvml.GpuInstanceProfileInfo{Id: 19, SliceCount: 1, InstanceCount: 7, MultiprocessorCount: 16, CopyEngineCount: 1, MemorySizeMB: 9984},
				1, []uint32{0, 1, 2, 3, 4, 5, 6}, false},
			{},
			{nvml.GpuInstanceProfileInfo{Id: 9, SliceCount: 3, InstanceCount: 2, MultiprocessorCount: 60, CopyEngineCount: 3, MemorySizeMB: 40448},
				4, []uint32{4, 0}, false},
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
func (f *MIG) change(function string, do func() nvml.Return) nvml.Return {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Calls = append(f.Calls, function)
	if ret := say(f.Answers, function); ret != nvml.SUCCESS {
		return ret
	}
	if ret := do(); ret != nvml.SUCCESS {
		return ret
	}
	return say(f.After, function)
}

// ask calls read, which returns the result of a fake NVML function. If answers has an error for the
// function, ask returns that error instead.
func ask[T any](f *MIG, function string, read func() (T, nvml.Return)) (T, nvml.Return) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ret := say(f.Answers, function); ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return read()
}

// modeNumberOf returns NVML's number of a MIG mode.
func modeNumberOf(on bool) int {
	if on {
		return nvml.DEVICE_MIG_ENABLE
	}
	return nvml.DEVICE_MIG_DISABLE
}

func (f *MIG) Folder(instance uint32) string {
	return fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", f.minor, instance)
}

// install replaces the MIG functions of the mock device with those of this fake card.
func (f *MIG) install(d *mock.Device) {
	d.GetMigModeFunc = func() (int, int, nvml.Return) {
		modes, ret := ask(f, "nvmlDeviceGetMigMode",
			func() ([2]int, nvml.Return) { return [2]int{modeNumberOf(f.On), modeNumberOf(f.Next)}, nvml.SUCCESS })
		return modes[0], modes[1], ret
	}
	d.SetMigModeFunc = func(mode int) (nvml.Return, nvml.Return) {
		activation := f.Activation
		ret := f.change(fmt.Sprintf("nvmlDeviceSetMigMode %d", mode), func() nvml.Return {
			if len(f.Instances) > 0 && mode == nvml.DEVICE_MIG_DISABLE {
				return nvml.ERROR_IN_USE
			}
			f.Next = mode == nvml.DEVICE_MIG_ENABLE
			if f.NeedsReset {
				activation = nvml.ERROR_RESET_REQUIRED
			}
			if activation == nvml.SUCCESS {
				f.On = f.Next
			}
			return nvml.SUCCESS
		})
		return activation, ret
	}
	d.GetGpuInstanceProfileInfoFunc = func(i int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstanceProfileInfo", func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
			if i >= len(f.Profiles) {
				return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
			}
			if f.Profiles[i].Size == 0 {
				return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
			}
			return f.Profiles[i].GpuInstanceProfileInfo, nvml.SUCCESS
		})
	}
	d.GetGpuInstancePossiblePlacementsFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstancePossiblePlacements", func() ([]nvml.GpuInstancePlacement, nvml.Return) {
			p := f.profile(info.Id)
			var places []nvml.GpuInstancePlacement
			for i, start := range p.Starts {
				place := nvml.GpuInstancePlacement{Start: start, Size: p.Size}
				if p.Growing {
					place.Size += uint32(i)
				}
				places = append(places, place)
			}
			return places, nvml.SUCCESS
		})
	}
	d.GetGpuInstancesFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstances", func() ([]nvml.GpuInstance, nvml.Return) {
			var handles []nvml.GpuInstance
			for _, id := range slices.Sorted(maps.Keys(f.Instances)) {
				if f.Instances[id].ProfileId == info.Id {
					handles = append(handles, f.handle(id))
				}
			}
			return handles, nvml.SUCCESS
		})
	}
	d.GetGpuInstanceByIdFunc = func(id int) (nvml.GpuInstance, nvml.Return) {
		return ask(f, "nvmlDeviceGetGpuInstanceById", func() (nvml.GpuInstance, nvml.Return) {
			if f.Instances[uint32(id)] == nil {
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
			if !f.On {
				return nvml.ERROR_NOT_SUPPORTED
			}
			for _, i := range f.Instances {
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
}

func (f *MIG) profile(id uint32) Profile {
	for _, p := range f.Profiles {
		if p.Id == id && p.Size > 0 {
			return p
		}
	}
	return Profile{}
}

// add creates a GPU instance on the fake card, as the driver or an admin would.
func (f *MIG) add(profile uint32, at nvml.GpuInstancePlacement) uint32 {
	id := uint32(1)
	for f.Instances[id] != nil {
		id++
	}
	if f.Misplaces {
		at.Start++
	}
	f.Instances[id] = &Instance{nvml.GpuInstanceInfo{Id: id, ProfileId: profile, Placement: at}, map[uint32]uint32{}}
	if f.NoCapabilities {
		return id
	}
	f.Host.File(f.Folder(id)+"/access", fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", f.capability(id)))
	return id
}

func (f *MIG) capability(instance uint32) int { return 3 + 135*f.minor + 9*int(instance) }

// AddCompute creates a compute instance on the fake card.
func (f *MIG) AddCompute(instance, profile uint32) uint32 {
	i := f.Instances[instance]
	id := uint32(len(i.Compute))
	i.Compute[id] = profile
	if f.NoCapabilities {
		return id
	}
	f.Host.File(fmt.Sprintf("%s/ci%d/access", f.Folder(instance), id),
		fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", f.capability(instance)+1+int(id)))
	return id
}

func (f *MIG) UUID(instance, compute uint32) string {
	return fmt.Sprintf("MIG-%s-%d-%d", f.gpu, instance, compute)
}

func (f *MIG) devices() []nvml.Device {
	var devices []nvml.Device
	for _, id := range slices.Sorted(maps.Keys(f.Instances)) {
		for _, compute := range slices.Sorted(maps.Keys(f.Instances[id].Compute)) {
			devices = append(devices, &mock.Device{
				GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return int(id), nvml.SUCCESS },
				GetComputeInstanceIdFunc: func() (int, nvml.Return) { return int(compute), nvml.SUCCESS },
				GetUUIDFunc:              func() (string, nvml.Return) { return f.UUID(id, compute), nvml.SUCCESS },
			})
		}
	}
	return devices
}

// handle returns a fake NVML handle of a GPU instance. It can still be used after the GPU instance
// was destroyed.
func (f *MIG) handle(id uint32) nvml.GpuInstance {
	return &mock.GpuInstance{
		GetInfoFunc: func() (nvml.GpuInstanceInfo, nvml.Return) {
			return ask(f, "nvmlGpuInstanceGetInfo", func() (nvml.GpuInstanceInfo, nvml.Return) {
				if f.Instances[id] == nil {
					return nvml.GpuInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				return f.Instances[id].GpuInstanceInfo, nvml.SUCCESS
			})
		},
		GetComputeInstanceProfileInfoFunc: func(profile, _ int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			return ask(f, "nvmlGpuInstanceGetComputeInstanceProfileInfo", func() (nvml.ComputeInstanceProfileInfo, nvml.Return) {
				i := f.Instances[id]
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
				if i := f.Instances[id]; i != nil {
					for _, compute := range slices.Sorted(maps.Keys(i.Compute)) {
						if i.Compute[compute] == info.Id {
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
			if i := f.Instances[id]; i != nil {
				if _, ok := i.Compute[uint32(compute)]; ok {
					return f.computeHandle(id, uint32(compute)), nvml.SUCCESS
				}
			}
			return nil, nvml.ERROR_NOT_FOUND
		},
		CreateComputeInstanceFunc: func(info *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
			var handle nvml.ComputeInstance
			ret := f.change("nvmlGpuInstanceCreateComputeInstance", func() nvml.Return {
				handle = f.computeHandle(id, f.AddCompute(id, info.Id))
				return nvml.SUCCESS
			})
			return handle, ret
		},
		DestroyFunc: func() nvml.Return {
			return f.change("nvmlGpuInstanceDestroy", func() nvml.Return {
				i := f.Instances[id]
				if i == nil {
					return nvml.ERROR_NOT_FOUND
				}
				if len(i.Compute) > 0 {
					return nvml.ERROR_IN_USE
				}
				delete(f.Instances, id)
				f.Host.Remove(f.Folder(id))
				return nvml.SUCCESS
			})
		},
	}
}

func (f *MIG) computeHandle(instance, compute uint32) nvml.ComputeInstance {
	return &mock.ComputeInstance{
		GetInfoFunc: func() (nvml.ComputeInstanceInfo, nvml.Return) {
			return ask(f, "nvmlComputeInstanceGetInfo", func() (nvml.ComputeInstanceInfo, nvml.Return) {
				i := f.Instances[instance]
				if i == nil {
					return nvml.ComputeInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				profile, ok := i.Compute[compute]
				if !ok {
					return nvml.ComputeInstanceInfo{}, nvml.ERROR_NOT_FOUND
				}
				return nvml.ComputeInstanceInfo{Id: compute, ProfileId: profile,
					Placement: nvml.ComputeInstancePlacement{Start: compute, Size: 1}}, nvml.SUCCESS
			})
		},
		DestroyFunc: func() nvml.Return {
			return f.change("nvmlComputeInstanceDestroy", func() nvml.Return {
				i := f.Instances[instance]
				if i == nil {
					return nvml.ERROR_NOT_FOUND
				}
				delete(i.Compute, compute)
				f.Host.Remove(fmt.Sprintf("%s/ci%d", f.Folder(instance), compute))
				return nvml.SUCCESS
			})
		},
	}
}

func (f *MIG) Partition(t *testing.T, profile, start, size uint32, compute ...uint32) uint32 {
	t.Helper()
	f.On, f.Next = true, true
	id := f.add(profile, nvml.GpuInstancePlacement{Start: start, Size: size})
	for _, c := range compute {
		f.AddCompute(id, c)
	}
	return id
}
