package nvidia

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// scanMIG scans a fake node whose GPU with minor number 1 has MIG. change adapts the fakes before
// the scan.
func scanMIG(t *testing.T, change func(fakeHost, *card, *fakeMIG)) Node {
	t.Helper()
	h := newFakeHost(t)
	cards := twoCards()
	c := &cards[1]
	c.mig, c.major = newFakeMIG(h, 1), 9
	change(h, c, c.mig)
	node, err := h.scanner(fakeNVML(cards...)).scan(t.Context())
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
		change func(fakeHost, *card, *fakeMIG)
		want   device.MIG
	}{
		"mode off": {func(fakeHost, *card, *fakeMIG) {}, device.MIG{Profiles: fakeProfiles}},
		"mode on": {func(_ fakeHost, _ *card, f *fakeMIG) { f.on, f.next = true, true },
			device.MIG{Enabled: true, Pending: true, Profiles: fakeProfiles}},
		"Ampere with a pending reset": {
			func(_ fakeHost, c *card, f *fakeMIG) { c.major, f.next = 8, true }, device.MIG{Pending: true, ModeFixed: true, Profiles: fakeProfiles},
		},
		"a vGPU guest": {
			func(_ fakeHost, c *card, f *fakeMIG) { c.virtualization = nvml.GPU_VIRTUALIZATION_MODE_VGPU },
			device.MIG{ReadOnly: true, Profiles: fakeProfiles},
		},
		"profiles without, with odd or with duplicate placements": {
			func(_ fakeHost, _ *card, f *fakeMIG) {
				f.profiles = append(f.profiles,
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 77, SliceCount: 2, InstanceCount: 1}, 2, nil},
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 78, SliceCount: 2, InstanceCount: 0}, 2, []uint32{0}},
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 19, SliceCount: 2, InstanceCount: 1}, 2, []uint32{0}},
				)
			}, device.MIG{Profiles: fakeProfiles},
		},
		"no profiles": {func(_ fakeHost, _ *card, f *fakeMIG) { f.profiles = nil }, device.MIG{}},
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

func TestScanReportsMIGInstances(t *testing.T) {
	node := scanMIG(t, func(_ fakeHost, _ *card, f *fakeMIG) {
		f.partition(t, 9, 4, 4, 0, 1)
		f.partition(t, 19, 0, 1, 0)
		f.partition(t, 19, 1, 1)
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
		node := scanMIG(t, func(_ fakeHost, _ *card, f *fakeMIG) {
			f.partition(t, 19, 0, 1)
			f.partition(t, 19, 1, 1, 0)
			f.answers[function] = nvml.ERROR_NOT_FOUND
		})
		if len(node.Problems) > 0 || len(node.GPUs) != 2 {
			t.Errorf("%s: %v", function, node.Problems)
		}
	}
}

func TestCardLostDuringScanIsProblem(t *testing.T) {
	node := scanMIG(t, func(_ fakeHost, _ *card, f *fakeMIG) {
		f.partition(t, 19, 0, 1)
		f.answers["nvmlGpuInstanceGetInfo"] = nvml.ERROR_GPU_IS_LOST
	})
	if len(node.Problems) != 1 || node.Problems[0].Uncertain != "" || !strings.Contains(node.Problems[0].Message, "fallen off the bus") {
		t.Errorf("%+v", node.Problems)
	}
}

func TestUnreadableMIGDisablesOnlyPartitions(t *testing.T) {
	for _, function := range []string{"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstancePossiblePlacements"} {
		node := scanMIG(t, func(_ fakeHost, _ *card, f *fakeMIG) { f.answers[function] = nvml.ERROR_UNKNOWN })
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
		node := scanMIG(t, func(_ fakeHost, _ *card, f *fakeMIG) {
			f.partition(t, 19, 0, 1, 0)
			f.answers[function] = nvml.ERROR_UNKNOWN
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
		node := scanMIG(t, func(h fakeHost, _ *card, f *fakeMIG) {
			f.partition(t, 19, 0, 1, 0)
			file := f.folder(1) + "/ci0/access"
			if h.remove(file); content != "" {
				h.file(file, content)
			}
		})
		if len(node.Problems) != 1 || !strings.Contains(node.Problems[0].Message, says) ||
			!strings.Contains(node.Problems[0].Message, "gpu1/mig/gi1/ci0/access") {
			t.Errorf("%q: %v", content, node.Problems)
		}
	}
}

func TestFingerprintChangesWithInstances(t *testing.T) {
	h := newFakeHost(t)
	f := newFakeMIG(h, 1)
	files := WithoutInstances(NewChangeDetector(h.paths()).Fingerprint())
	seen := map[string]bool{NewChangeDetector(h.paths()).Fingerprint(): true}
	for _, change := range []func(){
		func() { f.partition(t, 19, 0, 1) },
		func() { f.addCompute(1, 0) },
		func() { f.partition(t, 9, 4, 4) },
		func() { h.remove(f.folder(1)) },
	} {
		change()
		now := NewChangeDetector(h.paths()).Fingerprint()
		if seen[now] || WithoutInstances(now) != files || now == files {
			t.Errorf("fingerprint after a change: %s", now)
		}
		seen[now] = true
	}
}

func TestMIGDeviceEditsHaveParentAndCapabilities(t *testing.T) {
	h := newFakeHost(t)
	parent := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/dri/card1", HostPath: "/run/nvidia/driver/dev/dri/card1"},
			{Path: "/dev/nvidia1", HostPath: "/run/nvidia/driver/dev/nvidia1", Permissions: "rw"},
		},
		Hooks: []*specs.Hook{{HookName: "createContainer",
			Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "../card1::/dev/dri/by-path/x"}}},
	}
	got := h.paths().CapabilityEdits(parent, device.Instance{Minor: 147}, device.ComputeInstance{Minor: 148})
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
	p := h.paths()
	p.DevRoot = "/"
	p.HostDriverRoot, p.DriverRoot = "/", "/"
	if n := p.CapabilityEdits(parent, device.Instance{Minor: 1}, device.ComputeInstance{Minor: 2}).DeviceNodes[1]; n.HostPath != "" ||
		n.Path != "/dev/nvidia-caps/nvidia-cap1" {
		t.Errorf("%+v", n)
	}
}

func TestCapabilityNodesAreCreatedAndReplaced(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	h := newFakeHost(t)
	f := newFakeMIG(h, 1)
	f.partition(t, 19, 0, 1, 0)
	p := h.paths().withDefaults()
	if err := p.makeCapabilityNodes(1, 1, 0); err == nil || !strings.Contains(err.Error(), "proc/devices") {
		t.Errorf("without the list of devices: %v", err)
	}
	h.file("proc/devices", "Character devices:\n195 nvidia\n\nBlock devices:\n")
	if err := p.makeCapabilityNodes(1, 1, 0); err == nil || !strings.Contains(err.Error(), "does not list it") {
		t.Errorf("without the driver's major number: %v", err)
	}
	for _, major := range []uint64{0, 1} { // harmless numbers, of which the second simulates a module reload
		h.file("proc/devices", "Character devices:\n  "+string(rune('0'+major))+" nvidia-caps\n")
		for range 2 {
			if err := p.makeCapabilityNodes(1, 1, 0); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"nvidia-cap147", "nvidia-cap148"} {
			info, err := os.Lstat(filepath.Join(h.root, "driver/dev/nvidia-caps", name))
			if err != nil || info.Mode().Perm() != 0o444 || deviceNumber(info)>>8 != major {
				t.Errorf("%s: %v, %v", name, info, err)
			}
		}
	}
}
