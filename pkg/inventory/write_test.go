package inventory

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestTheTable(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0")
	node.GPUs[0].NUMANode, node.GPUs[0].PCIeRoot = ptr.To(0), "pci0000:15"
	node.Problems = []nvidia.Problem{{PCIAddress: "0000:52:00.0", Message: "MIG mode is on"}, {Message: "lost"}}
	var out strings.Builder
	if err := WriteTable(&out, node); err != nil {
		t.Fatal(err)
	}
	want := `Driver 580.65.06, CUDA 13.0

NAME              PRODUCT      MEMORY  NUMA  PCIE ROOT   MINOR  UUID
gpu-0000-1b-00-0  NVIDIA H200  1Gi     0     pci0000:15  0      GPU-0000:1b:00.0
gpu-0000-43-00-0  NVIDIA H200  1Gi     -     -           1      GPU-0000:43:00.0

Not offered, or not in every shape:
  0000:52:00.0: MIG mode is on
  lost
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestTheTableShowsHowGPUsAreCut(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:9b:00.0")
	small := device.Profile{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1}}
	large := device.Profile{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}}
	node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true, Profiles: []device.Profile{large, small}, Instances: []device.Instance{
		{ID: 1, ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Compute: []device.ComputeInstance{
			{Name: "1c.3g.40gb", Placement: device.Placement{Size: 1}, UUID: "MIG-a"}, {ID: 1, Name: "2c.3g.40gb", Placement: device.Placement{Start: 1, Size: 2}, UUID: "MIG-b"},
		}},
		{ID: 7, ProfileID: 19, Placement: device.Placement{Size: 1}, Compute: []device.ComputeInstance{{Name: "1g.10gb", Placement: device.Placement{Size: 1}, UUID: "MIG-c"}}},
		{ID: 8, ProfileID: 19, Placement: device.Placement{Start: 1, Size: 1}},
	}}
	node.GPUs[1].MIG = &device.MIG{ModeFixed: true, Pending: true, Profiles: []device.Profile{small}}
	node.GPUs[2].MIG = &device.MIG{Uncuttable: true}
	var out strings.Builder
	if err := WriteTable(&out, node); err != nil {
		t.Fatal(err)
	}
	_, cuts, _ := strings.Cut(out.String(), "GPU-0000:9b:00.0\n")
	want := `
NAME              MIG MODE                                     PROFILES
gpu-0000-1b-00-0  on                                           2 x 3g.40gb, 7 x 1g.10gb
gpu-0000-43-00-0  off (on after a reset)                       7 x 1g.10gb
gpu-0000-52-00-0  off (fixed by the host of this virtual GPU)  -

INSTANCE                       ID  PLACEMENT  PROFILE     UUID
gpu-0000-1b-00-0-mig-9-4-ci-0  1   4:4        1c.3g.40gb  MIG-a
gpu-0000-1b-00-0-mig-9-4-ci-1  1   4:4        2c.3g.40gb  MIG-b
gpu-0000-1b-00-0-mig-19-0      7   0:1        1g.10gb     MIG-c
gpu-0000-1b-00-0-mig-19-1      8   1:1        1g.10gb     none: it has no compute instance
`
	if diff := cmp.Diff(want, cuts); diff != "" {
		t.Error(diff)
	}
}

func TestTheTableOfANodeWithoutGPUsHasNoHead(t *testing.T) {
	var out strings.Builder
	if err := WriteTable(&out, nvidia.Node{}); err != nil || strings.Contains(out.String(), "NAME") || !strings.Contains(out.String(), "CUDA unknown") {
		t.Errorf("%s, %v", out.String(), err)
	}
}

func TestTheSlicesAreThoseOfTheAPI(t *testing.T) {
	for given, want := range map[string]string{"node-1": "node-1", "": ""} {
		var out strings.Builder
		if err := WriteSlices(&out, nodeWith("0000:1b:00.0"), "gpu.nvidia.com", given); err != nil {
			t.Fatal(err)
		}
		document, ok := strings.CutPrefix(out.String(), "---\n")
		var slice resourceapi.ResourceSlice
		if err := yaml.UnmarshalStrict([]byte(document), &slice); err != nil || !ok {
			t.Fatal(err)
		}
		if slice.Kind != "ResourceSlice" || slice.APIVersion != "resource.k8s.io/v1" || slice.Spec.Driver != "gpu.nvidia.com" ||
			len(slice.Spec.Devices) != 1 || slice.Spec.Pool.ResourceSliceCount != 1 {
			t.Errorf("%+v", slice)
		}
		if *slice.Spec.NodeName == "" || want != "" && (*slice.Spec.NodeName != want || slice.Spec.Pool.Name != want) {
			t.Errorf("node is %q", *slice.Spec.NodeName)
		}
	}
}

// full is a disk without room.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestAnOutputThatCannotBeWrittenIsAnError(t *testing.T) {
	node := nodeWith("0000:1b:00.0")
	if WriteTable(full{}, node) == nil || WriteSlices(full{}, node, "d", "n") == nil {
		t.Error("it went unnoticed")
	}
}
