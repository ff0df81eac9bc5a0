package scan

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// scanMIG scans a fake node whose GPU with minor number 1 has MIG. change adapts the fakes before
// the scan.
func scanMIG(t *testing.T, change func(nvidiatest.Host, *nvidiatest.Card, *nvidiatest.MIG)) nvidia.Node {
	t.Helper()
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	c := &cards[1]
	c.MIG, c.Major = nvidiatest.NewMIG(h, 1), 9
	change(h, c, c.MIG)
	node, err := scannerOf(h, nvidiatest.NVML(cards...)).scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return node
}

var fakeProfiles = []device.Profile{
	{
		ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, MemoryBytes: 40448 << 20,
		Engines: device.Engines{Multiprocessors: 60, CopyEngines: 3}, Size: 4, Starts: []uint32{0, 4},
	},
	{
		ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, MemoryBytes: 9984 << 20,
		Engines: device.Engines{Multiprocessors: 16, CopyEngines: 1}, Size: 1, Starts: []uint32{0, 1, 2, 3, 4, 5, 6},
	},
}

func TestScanReportsMIGProfiles(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(nvidiatest.Host, *nvidiatest.Card, *nvidiatest.MIG)
		want   device.MIG
	}{
		"mode off": {func(nvidiatest.Host, *nvidiatest.Card, *nvidiatest.MIG) {}, device.MIG{Profiles: fakeProfiles}},
		"mode on": {func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) { f.On, f.Next = true, true },
			device.MIG{Enabled: true, Pending: true, Profiles: fakeProfiles}},
		"Ampere with a pending reset": {
			func(_ nvidiatest.Host, c *nvidiatest.Card, f *nvidiatest.MIG) { c.Major, f.Next = 8, true },
			device.MIG{Pending: true, ModeFixed: true, Profiles: fakeProfiles},
		},
		"a vGPU guest": {
			func(_ nvidiatest.Host, c *nvidiatest.Card, f *nvidiatest.MIG) {
				c.Virtualization = nvml.GPU_VIRTUALIZATION_MODE_VGPU
			},
			device.MIG{ReadOnly: true, Profiles: fakeProfiles},
		},
		"profiles without, with odd or with duplicate placements": {
			func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
				f.Profiles = append(f.Profiles,
					nvidiatest.Profile{GpuInstanceProfileInfo: nvml.GpuInstanceProfileInfo{Id: 77, SliceCount: 2, InstanceCount: 1}, Size: 2},
					nvidiatest.Profile{GpuInstanceProfileInfo: nvml.GpuInstanceProfileInfo{Id: 78, SliceCount: 2, InstanceCount: 0},
						Size: 2, Starts: []uint32{0}},
					nvidiatest.Profile{GpuInstanceProfileInfo: nvml.GpuInstanceProfileInfo{Id: 19, SliceCount: 2, InstanceCount: 1},
						Size: 2, Starts: []uint32{0}},
				)
			}, device.MIG{Profiles: fakeProfiles},
		},
		"no profiles": {func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) { f.Profiles = nil }, device.MIG{}},
	} {
		t.Run(name, func(t *testing.T) {
			node := scanMIG(t, tc.change)
			if len(node.GPUs) != 2 || len(node.Problems) > 0 {
				t.Fatal(node.Problems)
			}
			if diff := cmp.Diff(&tc.want, node.GPUs[0].MIG); diff != "" {
				t.Error(diff)
			}
			if node.GPUs[1].MIG != nil {
				t.Errorf("a card without MIG has %+v", node.GPUs[1].MIG)
			}
		})
	}
}

// A profile of a form that this driver does not know costs only itself.
func TestUnknownProfileIsNamed(t *testing.T) {
	node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
		f.Profiles = append(f.Profiles, nvidiatest.Profile{
			GpuInstanceProfileInfo: nvml.GpuInstanceProfileInfo{Id: 88, SliceCount: 2, InstanceCount: 2, MemorySizeMB: 20480},
			Size:                   2, Starts: []uint32{0, 4}, Growing: true,
		})
	})
	if len(node.GPUs) != 2 || len(node.Problems) > 0 {
		t.Fatal(node.GPUs, node.Problems)
	}
	if diff := cmp.Diff(fakeProfiles, node.GPUs[0].MIG.Profiles); diff != "" {
		t.Error(diff)
	}
	named := func(o nvidia.Omission) bool {
		return o.Kind == nvidia.UnknownProfile && strings.Contains(o.Name, "20gb") && strings.Contains(o.Name, "0000:1b:00.0")
	}
	if !slices.ContainsFunc(node.Omissions, named) {
		t.Errorf("%v", node.Omissions)
	}
}

func TestScanReportsMIGInstances(t *testing.T) {
	node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
		f.Partition(t, 9, 4, 4, 0, 1)
		f.Partition(t, 19, 0, 1, 0)
		f.Partition(t, 19, 1, 1)
	})
	want := []device.Instance{
		{
			ID: 1, ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Minor: 3 + 135 + 9,
			Compute: []device.ComputeInstance{
				{ID: 0, Name: "1c.3g.40gb", Placement: device.Placement{Start: 0, Size: 1}, Multiprocessors: 16, UUID: "MIG-GPU-1-1-0",
					Minor: 3 + 135 + 9 + 1},
				{ID: 1, ProfileID: 1, Name: "2c.3g.40gb", Placement: device.Placement{Start: 1, Size: 1}, Multiprocessors: 32, UUID: "MIG-GPU-1-1-1",
					Minor: 3 + 135 + 9 + 2},
			},
		},
		{
			ID: 2, ProfileID: 19, Placement: device.Placement{Start: 0, Size: 1}, Minor: 3 + 135 + 18,
			Compute: []device.ComputeInstance{
				{ID: 0, Name: "1g.10gb", Placement: device.Placement{Start: 0, Size: 1}, Multiprocessors: 16, UUID: "MIG-GPU-1-2-0",
					Minor: 3 + 135 + 18 + 1},
			},
		},
		{ID: 3, ProfileID: 19, Placement: device.Placement{Start: 1, Size: 1}, Minor: 3 + 135 + 27},
	}
	if diff := cmp.Diff(want, node.GPUs[0].MIG.Instances); diff != "" {
		t.Error(diff)
	}
}

func TestVanishedInstanceIsLeftOut(t *testing.T) {
	for _, function := range []string{"nvmlGpuInstanceGetInfo", "nvmlComputeInstanceGetInfo", "nvmlGpuInstanceGetComputeInstances",
		"nvmlDeviceGetMigDeviceHandleByIndex"} {
		node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
			f.Partition(t, 19, 0, 1)
			f.Partition(t, 19, 1, 1, 0)
			f.Answers[function] = nvml.ERROR_NOT_FOUND
		})
		if len(node.Problems) > 0 || len(node.GPUs) != 2 {
			t.Errorf("%s: %v", function, node.Problems)
		}
	}
}

func TestCardLostDuringScanIsProblem(t *testing.T) {
	node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
		f.Partition(t, 19, 0, 1)
		f.Answers["nvmlGpuInstanceGetInfo"] = nvml.ERROR_GPU_IS_LOST
	})
	if len(node.Problems) != 1 || node.Problems[0].Uncertain != "" || !strings.Contains(node.Problems[0].Message, "fallen off the bus") {
		t.Errorf("%+v", node.Problems)
	}
}

func TestUnreadableMIGDisablesOnlyPartitions(t *testing.T) {
	for _, function := range []string{"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstancePossiblePlacements"} {
		node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
			f.Answers[function] = nvml.ERROR_UNKNOWN
		})
		if len(node.GPUs) != 2 || len(node.Problems) != 1 || !strings.Contains(node.Problems[0].Message, "offered as a whole only") {
			t.Errorf("%s: %d GPUs, %v", function, len(node.GPUs), node.Problems)
		}
		if m := node.GPUs[0].MIG; m == nil || len(m.Profiles) > 0 {
			t.Errorf("%s: %+v", function, m)
		}
	}
	for _, function := range []string{
		"nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlGpuInstanceGetComputeInstances", "nvmlComputeInstanceGetInfo", "nvmlDeviceGetMaxMigDeviceCount",
		"nvmlDeviceGetMigDeviceHandleByIndex",
	} {
		node := scanMIG(t, func(_ nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
			f.Partition(t, 19, 0, 1, 0)
			f.Answers[function] = nvml.ERROR_UNKNOWN
		})
		if len(node.GPUs) != 1 || len(node.Problems) != 1 || node.Problems[0].PCIAddress != "0000:1b:00.0" ||
			!strings.Contains(node.Problems[0].Message, "unknown error of the driver") {
			t.Errorf("%s: %d GPUs, %v", function, len(node.GPUs), node.Problems)
		}
		if uncertain := function != "nvmlDeviceGetMigMode"; len(node.Problems) == 1 &&
			uncertain != (node.Problems[0].Uncertain == "GPU-00000000-0000-0000-0000-00000000001b") {
			t.Errorf("%s: the problem lacks the UUID of the known card: %+v", function, node.Problems)
		}
	}
}

func TestBadCapabilityFilesAreNamed(t *testing.T) {
	for content, says := range map[string]string{"": "no such file", "nonsense": "names no DeviceFileMinor",
		"DeviceFileMinor: -1\n": "names no DeviceFileMinor"} {
		node := scanMIG(t, func(h nvidiatest.Host, _ *nvidiatest.Card, f *nvidiatest.MIG) {
			f.Partition(t, 19, 0, 1, 0)
			file := f.Folder(1) + "/ci0/access"
			if h.Remove(file); content != "" {
				h.File(file, content)
			}
		})
		if len(node.Problems) != 1 || !strings.Contains(node.Problems[0].Message, says) ||
			!strings.Contains(node.Problems[0].Message, "gpu1/mig/gi1/ci0/access") {
			t.Errorf("%q: %v", content, node.Problems)
		}
	}
}

func TestMIGDeviceEditsHaveParentAndCapabilities(t *testing.T) {
	h := nvidiatest.NewHost(t)
	parent := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/dri/card1", HostPath: "/run/nvidia/driver/dev/dri/card1"},
			{Path: "/dev/nvidia1", HostPath: "/run/nvidia/driver/dev/nvidia1", Permissions: "rw"},
		},
		Hooks: []*specs.Hook{{HookName: "createContainer",
			Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "../card1::/dev/dri/by-path/x"}}},
	}
	got := CapabilityEdits(h.Paths(), parent, device.Instance{Minor: 147}, device.ComputeInstance{Minor: 148})
	want := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
		{Path: "/dev/nvidia1", HostPath: "/run/nvidia/driver/dev/nvidia1", Permissions: "rw"},
		{Path: "/dev/nvidia-caps/nvidia-cap147", HostPath: "/run/nvidia/driver/dev/nvidia-caps/nvidia-cap147", Permissions: "rw"},
		{Path: "/dev/nvidia-caps/nvidia-cap148", HostPath: "/run/nvidia/driver/dev/nvidia-caps/nvidia-cap148", Permissions: "rw"},
	}, Hooks: []*specs.Hook{}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(parent.DeviceNodes) != 2 || len(parent.Hooks) != 1 {
		t.Error("the parent's edits were changed")
	}
	p := h.Paths()
	p.DevRoot = "/"
	p.HostDriverRoot, p.DriverRoot = "/", "/"
	if n := CapabilityEdits(p, parent, device.Instance{Minor: 1}, device.ComputeInstance{Minor: 2}).DeviceNodes[1]; n.HostPath != "" ||
		n.Path != "/dev/nvidia-caps/nvidia-cap1" {
		t.Errorf("%+v", n)
	}
}

func TestCapabilityNodesHaveNumbers(t *testing.T) {
	h := nvidiatest.NewHost(t)
	h.File("proc/devices", "Character devices:\n195 nvidia\n234 nvidia-caps\n\nBlock devices:\n")
	h.File("proc/driver/nvidia/capabilities/mig/monitor", "DeviceFileMinor: 2\nDeviceFileMode: 292\n")
	mode := os.FileMode(0o444)
	node := func(minor int64) *specs.DeviceNode {
		return &specs.DeviceNode{
			Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), Type: "c", Major: 234, Minor: minor, FileMode: &mode,
			Permissions: "rw",
		}
	}
	got := CapabilityEdits(h.Paths(), specs.ContainerEdits{}, device.Instance{Minor: 147}, device.ComputeInstance{Minor: 148})
	if diff := cmp.Diff([]*specs.DeviceNode{node(147), node(148)}, got.DeviceNodes); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]*specs.DeviceNode{node(2)}, MonitorEdits(h.Paths()).DeviceNodes); diff != "" {
		t.Error("for a monitoring container:", diff)
	}
	if n := MonitorEdits(nvidiatest.EmptyHost(t).Paths()).DeviceNodes; n != nil {
		t.Errorf("without MIG capabilities: %v", n)
	}
}
