package conformance

import (
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// shape is one possible GPU instance of a model: a profile, and the first memory slice of the
// placement.
type shape struct {
	profile model.Profile
	start   uint32
}

func shapesOf(m *model.GPU) []shape {
	var all []shape
	for _, p := range m.MIG.Profiles {
		for _, start := range p.Placements.Starts {
			all = append(all, shape{p, start})
		}
	}
	return all
}

func migModels(t *testing.T) map[string]*model.GPU {
	t.Helper()
	models := readModels(t)
	for key, m := range models {
		if !m.MIG.Supported.Value {
			delete(models, key)
		}
	}
	if len(models) == 0 {
		t.Fatal("no model has MIG")
	}
	return models
}

// inMIG returns a simulated node with count GPUs, all in MIG mode, of the model whose file name is
// key.
func inMIG(t *testing.T, key string, count int) *model.Node {
	t.Helper()
	node := manyOf(t, key, count)
	for i := range node.GPUs {
		node.GPUs[i].MIG = &model.CardMIG{Enabled: true}
	}
	return node
}

func createAt(device nvml.Device, s shape) (nvml.GpuInstance, nvml.Return) {
	return device.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: s.profile.ID},
		&nvml.GpuInstancePlacement{Start: s.start, Size: s.profile.Placements.Size})
}

// For every model, the library must create exactly those sets of GPU instances that model.MIG.Holds
// allows, on which the model in memory is built. The test tries all sets.
func TestModelFileRuleIsExact(t *testing.T) {
	needSimulator(t)
	for key, m := range migModels(t) {
		if sanitized() && m.MIG.MemorySlices > 4 {
			continue // the larger models use the same code and would take very long
		}
		t.Run(key, func(t *testing.T) {
			newWorld(t, inMIG(t, key, 1)).give("nvidia-caps/nvidia-cap1")
			device := devices(t, initialize(t))[0]
			all, sets, tries := shapesOf(m), 0, 0
			var explore func(made []shape, next int)
			explore = func(made []shape, next int) {
				sets++
				for i, s := range all {
					tries++
					allowed := m.MIG.Holds(placesOf(append(slices.Clone(made), s))...)
					instance, ret := createAt(device, s)
					if allowed != (ret == nvml.SUCCESS) || (!allowed && ret != nvml.ERROR_INSUFFICIENT_RESOURCES) {
						t.Fatalf("with %s: %s gives %v, the rule says %t", inWords(made), inWords([]shape{s}), ret, allowed)
					}
					if ret != nvml.SUCCESS {
						continue
					}
					if i >= next {
						explore(append(slices.Clone(made), s), i+1)
					}
					if ret := instance.Destroy(); ret != nvml.SUCCESS {
						t.Fatalf("destroy %s: %v", inWords([]shape{s}), ret)
					}
				}
			}
			explore(nil, 0)
			t.Logf("%d sets, %d tries", sets, tries)
		})
	}
}

func placesOf(set []shape) []model.Place {
	var places []model.Place
	for _, s := range set {
		places = append(places, model.Place{Profile: s.profile.ID, Start: s.start})
	}
	return places
}

func inWords(set []shape) string {
	text := ""
	for _, s := range set {
		text += fmt.Sprintf("[%s at %d]", s.profile.Name, s.start)
	}
	return "{" + text + "}"
}

// The remaining capacity of a profile must be exact: each new GPU instance of the profile reduces
// it by one, down to 0.
func TestRemainingCapacityIsExact(t *testing.T) {
	needSimulator(t)
	for key, m := range migModels(t) {
		t.Run(key, func(t *testing.T) {
			newWorld(t, inMIG(t, key, 1)).give("nvidia-caps/nvidia-cap1")
			device := devices(t, initialize(t))[0]
			for _, p := range m.MIG.Profiles {
				info := &nvml.GpuInstanceProfileInfo{Id: p.ID}
				left, ret := device.GetGpuInstanceRemainingCapacity(info)
				want(t, p.Name+": remaining capacity", ret, nvml.SUCCESS)
				if left != int(p.InstancesMax) {
					t.Errorf("%s: %d can be made of an empty GPU, the model file says %d", p.Name, left, p.InstancesMax)
				}
				var made []nvml.GpuInstance
				for ; left > 0; left-- {
					instance, ret := device.CreateGpuInstance(info)
					want(t, p.Name+": create", ret, nvml.SUCCESS)
					made = append(made, instance)
					now, ret := device.GetGpuInstanceRemainingCapacity(info)
					want(t, p.Name+": remaining capacity", ret, nvml.SUCCESS)
					if now != left-1 {
						t.Errorf("%s: %d left after one of %d was made", p.Name, now, left)
					}
				}
				_, ret = device.CreateGpuInstance(info)
				want(t, p.Name+": one too many", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
				for _, instance := range made {
					want(t, p.Name+": destroy", instance.Destroy(), nvml.SUCCESS)
				}
			}
		})
	}
}

// GPU instance IDs and the driver's own choice of placements must be as observed on an H100: IDs
// follow the share of memory, and placements for large GPU instances stay free.
func TestDriverPlacementMatchesHardware(t *testing.T) {
	newWorld(t, inMIG(t, "h100-sxm5-80gb", 1)).give("nvidia-caps/nvidia-cap1")
	device := devices(t, initialize(t))[0]
	var ids []uint32
	for range 7 {
		instance, ret := device.CreateGpuInstance(&nvml.GpuInstanceProfileInfo{Id: 19})
		want(t, "create", ret, nvml.SUCCESS)
		info, ret := instance.GetInfo()
		want(t, "info", ret, nvml.SUCCESS)
		ids = append(ids, info.Id)
		if info.Placement.Start != info.Id-7 {
			t.Errorf("ID %d lies at %d", info.Id, info.Placement.Start)
		}
	}
	if seen := []uint32{13, 11, 12, 7, 8, 9, 10}; !slices.Equal(ids, seen) {
		t.Errorf("IDs %v, want %v", ids, seen)
	}
}
