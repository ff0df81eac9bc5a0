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

// scanCut scans a node whose GPU with minor 1 can be cut.
func scanCut(t *testing.T, change func(fakeHost, *card, *fakeCut)) Node {
	t.Helper()
	h := newFakeHost(t)
	cards := twoCards()
	c := &cards[1]
	c.cut, c.major = newFakeCut(h, 1), 9
	change(h, c, c.cut)
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

func TestAScanSaysWhatAGPUCanBeCutInto(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(fakeHost, *card, *fakeCut)
		want   device.MIG
	}{
		"mode off": {func(fakeHost, *card, *fakeCut) {}, device.MIG{Profiles: fakeProfiles}},
		"mode on":  {func(_ fakeHost, _ *card, f *fakeCut) { f.on, f.next = true, true }, device.MIG{Enabled: true, Pending: true, Profiles: fakeProfiles}},
		"Ampere, waiting for its reset": {
			func(_ fakeHost, c *card, f *fakeCut) { c.major, f.next = 8, true }, device.MIG{Pending: true, ModeFixed: true, Profiles: fakeProfiles},
		},
		"the guest of a virtual GPU": {
			func(_ fakeHost, c *card, f *fakeCut) { c.virtualization = nvml.GPU_VIRTUALIZATION_MODE_VGPU },
			device.MIG{Uncuttable: true, Profiles: fakeProfiles},
		},
		"profiles without a place, or with odd ones, or twice": {
			func(_ fakeHost, _ *card, f *fakeCut) {
				f.profiles = append(f.profiles,
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 77, SliceCount: 2, InstanceCount: 1}, 2, nil},
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 78, SliceCount: 2, InstanceCount: 0}, 2, []uint32{0}},
					fakeProfile{nvml.GpuInstanceProfileInfo{Id: 19, SliceCount: 2, InstanceCount: 1}, 2, []uint32{0}},
				)
			}, device.MIG{Profiles: fakeProfiles},
		},
		"no profile at all": {func(_ fakeHost, _ *card, f *fakeCut) { f.profiles = nil }, device.MIG{}},
	} {
		t.Run(name, func(t *testing.T) {
			node := scanCut(t, tc.change)
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

func TestAScanSaysHowAGPUIsCut(t *testing.T) {
	node := scanCut(t, func(_ fakeHost, _ *card, f *fakeCut) {
		f.cut(t, 9, 4, 4, 0, 1)
		f.cut(t, 19, 0, 1, 0)
		f.cut(t, 19, 1, 1)
	})
	want := []device.Instance{
		{
			ID: 1, ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Minor: 3 + 135 + 9,
			Compute: []device.ComputeInstance{
				{ID: 0, Name: "1c.3g.40gb", Placement: device.Placement{Start: 0, Size: 1}, Multiprocessors: 16, UUID: "MIG-GPU-1-1-0", Minor: 3 + 135 + 9 + 1},
				{ID: 1, ProfileID: 1, Name: "2c.3g.40gb", Placement: device.Placement{Start: 1, Size: 1}, Multiprocessors: 32, UUID: "MIG-GPU-1-1-1", Minor: 3 + 135 + 9 + 2},
			},
		},
		{
			ID: 2, ProfileID: 19, Placement: device.Placement{Start: 0, Size: 1}, Minor: 3 + 135 + 18,
			Compute: []device.ComputeInstance{
				{ID: 0, Name: "1g.10gb", Placement: device.Placement{Start: 0, Size: 1}, Multiprocessors: 16, UUID: "MIG-GPU-1-2-0", Minor: 3 + 135 + 18 + 1},
			},
		},
		{ID: 3, ProfileID: 19, Placement: device.Placement{Start: 1, Size: 1}, Minor: 3 + 135 + 27},
	}
	if diff := cmp.Diff(want, node.GPUs[0].MIG.Instances); diff != "" {
		t.Error(diff)
	}
}

func TestWhatVanishesWhileItIsReadIsLeftOut(t *testing.T) {
	for _, function := range []string{"nvmlGpuInstanceGetInfo", "nvmlComputeInstanceGetInfo", "nvmlGpuInstanceGetComputeInstances", "nvmlDeviceGetMigDeviceHandleByIndex"} {
		node := scanCut(t, func(_ fakeHost, _ *card, f *fakeCut) {
			f.cut(t, 19, 0, 1)
			f.cut(t, 19, 1, 1, 0)
			f.answers[function] = nvml.ERROR_NOT_FOUND
		})
		if len(node.Problems) > 0 || len(node.GPUs) != 2 {
			t.Errorf("%s: %v", function, node.Problems)
		}
	}
}

func TestACardThatIsLostWhileItIsReadIsNotTakenForWell(t *testing.T) {
	node := scanCut(t, func(_ fakeHost, _ *card, f *fakeCut) {
		f.cut(t, 19, 0, 1)
		f.answers["nvmlGpuInstanceGetInfo"] = nvml.ERROR_GPU_IS_LOST
	})
	if len(node.Problems) != 1 || node.Problems[0].Uncertain != "" || !strings.Contains(node.Problems[0].Message, "fallen off the bus") {
		t.Errorf("%+v", node.Problems)
	}
}

func TestMIGThatCannotBeReadCostsNoMoreThanItMust(t *testing.T) {
	for _, function := range []string{"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstancePossiblePlacements"} {
		node := scanCut(t, func(_ fakeHost, _ *card, f *fakeCut) { f.answers[function] = nvml.ERROR_UNKNOWN })
		if len(node.GPUs) != 2 || len(node.Problems) != 1 || !strings.Contains(node.Problems[0].Message, "offered as a whole only") {
			t.Errorf("%s: %d GPUs, %v", function, len(node.GPUs), node.Problems)
		}
		if m := node.GPUs[0].MIG; m == nil || len(m.Profiles) > 0 {
			t.Errorf("%s: %+v", function, m)
		}
	}
	for _, function := range []string{
		"nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlGpuInstanceGetComputeInstances", "nvmlComputeInstanceGetInfo", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
	} {
		node := scanCut(t, func(_ fakeHost, _ *card, f *fakeCut) {
			f.cut(t, 19, 0, 1, 0)
			f.answers[function] = nvml.ERROR_UNKNOWN
		})
		if len(node.GPUs) != 1 || len(node.Problems) != 1 || node.Problems[0].PCIAddress != "0000:1b:00.0" || !strings.Contains(node.Problems[0].Message, "unknown error of the driver") {
			t.Errorf("%s: %d GPUs, %v", function, len(node.GPUs), node.Problems)
		}
		if cut := function != "nvmlDeviceGetMigMode"; len(node.Problems) == 1 && cut != (node.Problems[0].Uncertain == "GPU-00000000-0000-0000-0000-00000000001b") {
			t.Errorf("%s: who knew it is not told that it is the same: %+v", function, node.Problems)
		}
	}
}

func TestCapabilityFilesThatAreMissingOrOddAreNamed(t *testing.T) {
	for content, says := range map[string]string{"": "no such file", "nonsense": "names no DeviceFileMinor", "DeviceFileMinor: -1\n": "names no DeviceFileMinor"} {
		node := scanCut(t, func(h fakeHost, _ *card, f *fakeCut) {
			f.cut(t, 19, 0, 1, 0)
			file := f.folder(1) + "/ci0/access"
			if h.remove(file); content != "" {
				h.file(file, content)
			}
		})
		if len(node.Problems) != 1 || !strings.Contains(node.Problems[0].Message, says) || !strings.Contains(node.Problems[0].Message, "gpu1/mig/gi1/ci0/access") {
			t.Errorf("%q: %v", content, node.Problems)
		}
	}
}

func TestTheFingerprintChangesWithTheInstances(t *testing.T) {
	h := newFakeHost(t)
	f := newFakeCut(h, 1)
	files := WithoutInstances(NewGlance(h.paths()).Fingerprint())
	seen := map[string]bool{NewGlance(h.paths()).Fingerprint(): true}
	for _, change := range []func(){
		func() { f.cut(t, 19, 0, 1) },
		func() { f.addCompute(1, 0) },
		func() { f.cut(t, 9, 4, 4) },
		func() { h.remove(f.folder(1)) },
	} {
		change()
		now := NewGlance(h.paths()).Fingerprint()
		if seen[now] || WithoutInstances(now) != files || now == files {
			t.Errorf("after a change: %s", now)
		}
		seen[now] = true
	}
}

func TestAMIGDeviceIsItsParentAndTwoCapabilities(t *testing.T) {
	h := newFakeHost(t)
	parent := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/dri/card1", HostPath: "/run/nvidia/driver/dev/dri/card1"},
			{Path: "/dev/nvidia1", HostPath: "/run/nvidia/driver/dev/nvidia1", Permissions: "rw"},
		},
		Hooks: []*specs.Hook{{HookName: "createContainer", Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "../card1::/dev/dri/by-path/x"}}},
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
	if n := p.CapabilityEdits(parent, device.Instance{Minor: 1}, device.ComputeInstance{Minor: 2}).DeviceNodes[1]; n.HostPath != "" || n.Path != "/dev/nvidia-caps/nvidia-cap1" {
		t.Errorf("%+v", n)
	}
}

func TestCapabilityNodesAreMadeAndMadeAnew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	h := newFakeHost(t)
	f := newFakeCut(h, 1)
	f.cut(t, 19, 0, 1, 0)
	p := h.paths().withDefaults()
	if err := p.makeCapabilityNodes(1, 1, 0); err == nil || !strings.Contains(err.Error(), "proc/devices") {
		t.Errorf("without a list of devices: %v", err)
	}
	h.file("proc/devices", "Character devices:\n195 nvidia\n\nBlock devices:\n")
	if err := p.makeCapabilityNodes(1, 1, 0); err == nil || !strings.Contains(err.Error(), "does not list it") {
		t.Errorf("without the driver's: %v", err)
	}
	for _, major := range []uint64{0, 1} { // harmless numbers; the second stands for another load of the module
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
