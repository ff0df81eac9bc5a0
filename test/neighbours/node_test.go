package neighbours

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

const (
	driverName = "gpu.nvidia.com"
	h100, a100 = "h100-sxm5-80gb", "a100-sxm4-80gb"

	isGPU   = `device.attributes["gpu.nvidia.com"].type == "gpu"`
	isSmall = `device.attributes["gpu.nvidia.com"].type == "mig" && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`
	isHalf  = `device.attributes["gpu.nvidia.com"].type == "mig" && device.attributes["gpu.nvidia.com"].profile == "3g.40gb"`
)

// cards returns n GPUs of a model. first is the number of their node, which becomes a part of the
// GPUs' UUIDs.
func cards(t *testing.T, key string, n, first int) []device.GPU {
	t.Helper()
	m, err := model.ReadGPU(filepath.Join("..", "nvmlsim", "models", key+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	major, _, err := m.ComputeCapability()
	if err != nil {
		t.Fatal(err)
	}
	var gpus []device.GPU
	for i := range n {
		g := device.GPU{
			PCIAddress: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x20+i)), UUID: fmt.Sprintf("GPU-%d-%d", first, i),
			ProductName: m.ProductName.Value, Architecture: m.Architecture.Value, Brand: m.Brand.Value,
			MemoryBytes: m.MemoryTotalMiB.Value << 20,
		}
		if m.MIG.Supported.Value {
			g.MIG = &device.MIG{ModeFixed: major < 9}
		}
		for _, p := range m.MIG.Profiles {
			g.MIG.Profiles = append(g.MIG.Profiles, device.Profile{
				ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax,
				MemoryBytes: p.MemoryMiB << 20, Size: p.Placements.Size, Starts: p.Placements.Starts,
				Engines: device.Engines{
					CopyEngines: p.CopyEngines, Decoders: p.Decoders, JPEGEngines: p.JPEGEngines, OFAEngines: p.OFAEngines,
				},
			})
		}
		if g.MIG != nil {
			slices.SortFunc(g.MIG.Profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
		}
		gpus = append(gpus, g)
	}
	return gpus
}

// inMIGMode enables MIG mode on those GPUs whose MIG mode changes only by a reset of the GPU. It
// returns all the given GPUs.
func inMIGMode(gpus []device.GPU) []device.GPU {
	for _, g := range gpus {
		if g.MIG != nil && g.MIG.ModeFixed {
			g.MIG.Enabled, g.MIG.Pending = true, true
		}
	}
	return gpus
}

// published returns the slices that the plugin publishes for these GPUs under these MIG policies.
func published(t *testing.T, policies string, gpus []device.GPU) []resourceslice.Slice {
	t.Helper()
	rules, err := settings.ParseMIG(policies)
	if err != nil {
		t.Fatal(err)
	}
	var offerings []device.Offering
	for _, g := range gpus {
		layout, _ := device.Decide(g, nil, rules.For(g), true)
		offerings = append(offerings, device.Offering{GPU: g, Layout: layout})
	}
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false)
}

func newScheduler(slices []resourceslice.Slice) *scheduler.Scheduler {
	return scheduler.New(driverName, slices, scheduler.Classes{isGPU: isGPU, isSmall: isSmall, isHalf: isHalf})
}

// allocate allocates n claims, each for one device of this DeviceClass, and returns the names of
// the allocated devices. A claim that the allocator refuses adds no name.
func allocate(t *testing.T, s *scheduler.Scheduler, taken *scheduler.Taken, class string, n int) []string {
	t.Helper()
	var names []string
	for range n {
		got, err := s.Allocate(t.Context(), taken, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range got {
			names = append(names, r.Device)
		}
	}
	return names
}
