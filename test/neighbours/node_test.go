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

// cards are GPUs of a model. first is the number of their node, which stands in what differs
// between nodes.
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
			ProductName: m.ProductName.Value, Architecture: m.Architecture.Value, Brand: m.Brand.Value, MemoryBytes: m.MemoryTotalMiB.Value << 20,
		}
		if m.MIG.Supported.Value {
			g.MIG = &device.MIG{ModeFixed: major < 9}
		}
		for _, p := range m.MIG.Profiles {
			g.MIG.Profiles = append(g.MIG.Profiles, device.Profile{
				ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax, MemoryBytes: p.MemoryMiB << 20,
				Engines: device.Engines{CopyEngines: p.CopyEngines, Decoders: p.Decoders, JPEGEngines: p.JPEGEngines, OFAEngines: p.OFAEngines},
				Size:    p.Placements.Size, Starts: p.Placements.Starts,
			})
		}
		if g.MIG != nil {
			slices.SortFunc(g.MIG.Profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
		}
		gpus = append(gpus, g)
	}
	return gpus
}

// cuttable puts cards into MIG mode whose mode only a reset changes.
func cuttable(gpus []device.GPU) []device.GPU {
	for _, g := range gpus {
		if g.MIG != nil && g.MIG.ModeFixed {
			g.MIG.Enabled, g.MIG.Pending = true, true
		}
	}
	return gpus
}

// published is what the plugin publishes of GPUs under policies.
func published(t *testing.T, policies string, gpus []device.GPU) []resourceslice.Slice {
	t.Helper()
	rules, err := device.ParsePolicies(policies)
	if err != nil {
		t.Fatal(err)
	}
	var offerings []device.Offering
	for _, g := range gpus {
		layout, _ := device.Decide(g, nil, rules.For(g), true)
		offerings = append(offerings, device.Offering{GPU: g, Layout: layout})
	}
	return device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"})
}

func newScheduler(slices []resourceslice.Slice) *scheduler.Scheduler {
	return scheduler.New(driverName, slices, scheduler.Classes{isGPU: isGPU, isSmall: isSmall, isHalf: isHalf})
}

// allocate asks for one device of a class at a time, n times, and returns those that there were.
func allocate(t *testing.T, s *scheduler.Scheduler, taken *scheduler.Taken, class string, n int) []string {
	t.Helper()
	var names []string
	for range n {
		got, err := s.Allocate(t.Context(), taken, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
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
