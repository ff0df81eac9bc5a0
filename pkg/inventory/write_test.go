package inventory

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// previewOf is what a node offers by the rules.
func previewOf(t *testing.T, r Rules, node nvidia.Node) Preview {
	t.Helper()
	p, err := r.Preview(node)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// configured are the rules of these settings, where claims hold nothing.
func configured(t *testing.T, policies, shares string) Rules {
	t.Helper()
	p, err := device.ParsePolicies(policies)
	if err != nil {
		t.Fatal(err)
	}
	s, err := device.ParseShares(shares)
	if err != nil {
		t.Fatal(err)
	}
	return Rules{Policies: p, Shares: s}
}

// records are those of claims that were given the instances with these IDs, and hold these shares.
type records struct {
	instances []uint32
	shares    map[string]bool
	err       error
}

func (r records) Explained(_ string, all []device.Instance) ([]device.Instance, error) {
	var ours []device.Instance
	for _, in := range all {
		if slices.Contains(r.instances, in.ID) {
			ours = append(ours, in)
		}
	}
	return ours, r.err
}

func (r records) HeldShares() (map[string]bool, error) { return r.shares, nil }

func TestTheTable(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0")
	node.GPUs[0].NUMANode, node.GPUs[0].PCIeRoot = ptr.To(0), "pci0000:15"
	node.GPUs[1].MemoryBytes = 0
	node.Problems = []nvidia.Problem{{PCIAddress: "0000:52:00.0", Message: "MIG mode is on"}, {Message: "lost"}}
	var out strings.Builder
	if err := WriteTable(&out, previewOf(t, Rules{}, node)); err != nil {
		t.Fatal(err)
	}
	want := `Driver 580.65.06, CUDA 13.0

NAME              PRODUCT      MEMORY  NUMA  PCIE ROOT   MINOR  UUID
gpu-0000-1b-00-0  NVIDIA H200  1Gi     0     pci0000:15  0      GPU-0000:1b:00.0
gpu-0000-43-00-0  NVIDIA H200  -       -     -           1      GPU-0000:43:00.0

NAME              MIG POLICY  DEVICES OFFERED
gpu-0000-1b-00-0  -           1 x whole
gpu-0000-43-00-0  -           1 x whole

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
	rules := configured(t, "dynamic", "")
	rules.Records = records{instances: []uint32{7, 8}}
	var out strings.Builder
	if err := WriteTable(&out, previewOf(t, rules, node)); err != nil {
		t.Fatal(err)
	}
	_, cuts, _ := strings.Cut(out.String(), "GPU-0000:9b:00.0\n")
	want := `
NAME              MIG MODE                                     PROFILES
gpu-0000-1b-00-0  on                                           2 x 3g.40gb, 7 x 1g.10gb
gpu-0000-43-00-0  off (on after a reset)                       7 x 1g.10gb
gpu-0000-52-00-0  off (fixed by the host of this virtual GPU)  -

INSTANCE                       ID  PLACEMENT  PROFILE     MADE FOR  UUID
gpu-0000-1b-00-0-mig-9-4-ci-0  1   4:4        1c.3g.40gb  an admin  MIG-a
gpu-0000-1b-00-0-mig-9-4-ci-1  1   4:4        2c.3g.40gb  an admin  MIG-b
gpu-0000-1b-00-0-mig-19-0      7   0:1        1g.10gb     a claim   MIG-c
gpu-0000-1b-00-0-mig-19-1      8   1:1        1g.10gb     a claim   none: it has no compute instance

NAME              MIG POLICY  DEVICES OFFERED
gpu-0000-1b-00-0  dynamic     1 x 1c.3g.40gb, 1 x 2c.3g.40gb, 1 x 1g.10gb
gpu-0000-43-00-0  dynamic     1 x whole
gpu-0000-52-00-0  dynamic     1 x whole
gpu-0000-9b-00-0  -           1 x whole

Not offered, or not in every shape:
  gpu-0000-1b-00-0: MIG instances are there that no claim has made: it is offered as it is cut
  gpu-0000-43-00-0: MIG mode is off, and on this card only a reset turns it on, which is pending
  gpu-0000-52-00-0: instances can be used but not made here, as in the guest of a virtual GPU
`
	if diff := cmp.Diff(want, cuts); diff != "" {
		t.Error(diff)
	}
}

// What is offered is what the configuration and the claims leave of what there is.
func TestTheOfferGoesByConfigurationAndClaims(t *testing.T) {
	small := device.Profile{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 2, Size: 1, Starts: []uint32{0, 1}}
	cut := device.Instance{ID: 7, ProfileID: 19, Placement: device.Placement{Size: 1}, Compute: []device.ComputeInstance{
		{Name: "1g.10gb", Placement: device.Placement{Size: 1}, UUID: "MIG-a"},
	}}
	mig := func(instances ...device.Instance) *device.MIG {
		on := len(instances) > 0
		return &device.MIG{Enabled: on, Pending: on, Profiles: []device.Profile{small}, Instances: instances}
	}
	const gpu = "gpu-0000-1b-00-0"
	for name, c := range map[string]struct {
		mig              *device.MIG
		policies, shares string
		records          Records
		offered, why     string
	}{
		"nothing said": {mig(), "", "", nil, "static 1 x whole", ""},
		"dynamic":      {mig(), "dynamic", "", nil, "dynamic 1 x whole, 2 x 1g.10gb", ""},
		"a list":       {mig(), "adopt(1g.10gb)", "", nil, "adopt(1g.10gb) 1 x whole, 2 x 1g.10gb", ""},
		"another list": {mig(), "dynamic(3g.40gb)", "", nil, "dynamic(3g.40gb) 1 x whole", "it has no profile 3g.40gb, which the policy dynamic(3g.40gb) names, so the policy static holds; its profiles are 1g.10gb"},
		"static":       {mig(), "static", "", nil, "static 1 x whole", ""},
		"off for this one": {
			mig(), "static,0000:1b:00.0=off", "", nil, "off 1 x whole", "",
		},
		"cut by nobody known": {mig(cut), "dynamic", "", nil, "dynamic 1 x 1g.10gb", "MIG instances are there that no claim has made: it is offered as it is cut"},
		"cut for a claim":     {mig(cut), "dynamic", "", records{instances: []uint32{7}}, "dynamic 1 x whole, 2 x 1g.10gb", ""},
		"cut for a claim and not to be cut any more": {
			mig(cut), "off", "", records{instances: []uint32{7}}, "off 1 x 1g.10gb",
			"the policy is to offer it as a whole only, which waits for claims that hold partitions",
		},
		"shared":           {nil, "", "shares:4", nil, "- 1 x whole, 1 x whole in 4 shares", ""},
		"partitions share": {mig(), "dynamic", "*/1g*=shares:3", nil, "dynamic 1 x whole, 2 x 1g.10gb, 2 x 1g.10gb in 3 shares", ""},
		"shared no more, and held": {
			nil, "", "", records{shares: map[string]bool{gpu + "-share": false}}, "- 1 x whole, 1 x whole in shares that claims hold, no others", "",
		},
		"in fractions": {nil, "", "fractions", nil, "- 1 x whole, 1 x whole in fractions", ""},
	} {
		t.Run(name, func(t *testing.T) {
			node := nodeWith("0000:1b:00.0")
			node.GPUs[0].MIG, node.GPUs[0].CUDAComputeCapability, node.GPUs[0].MemoryBytes = c.mig, "9.0", 80<<30
			rules := configured(t, c.policies, c.shares)
			rules.Records = c.records
			var out strings.Builder
			if err := WriteTable(&out, previewOf(t, rules, node)); err != nil {
				t.Fatal(err)
			}
			_, offer, _ := strings.Cut(out.String(), "DEVICES OFFERED\n")
			offer, why, _ := strings.Cut(offer, "\n\nNot offered, or not in every shape:\n")
			if got := strings.Join(strings.Fields(offer), " "); got != gpu+" "+c.offered {
				t.Errorf("offered is %q", got)
			}
			if c.why != "" {
				c.why = gpu + ": " + c.why
			}
			if got := strings.TrimSpace(why); got != c.why {
				t.Errorf("why: %q", got)
			}
		})
	}
}

func TestWhatCannotBeInFractionsIsNamedWithTheReason(t *testing.T) {
	node := nodeWith("0000:1b:00.0")
	node.GPUs[0].CUDAComputeCapability = "6.1"
	var out strings.Builder
	if err := WriteTable(&out, previewOf(t, configured(t, "", "fractions"), node)); err != nil {
		t.Fatal(err)
	}
	if want := "gpu-0000-1b-00-0: not in fractions: MPS cannot limit memory on GPUs before Volta"; !strings.Contains(out.String(), want) {
		t.Errorf("it does not say %q:\n%s", want, out.String())
	}
}

func TestRecordsThatCannotBeReadAreAnError(t *testing.T) {
	node := nodeWith("0000:1b:00.0")
	node.GPUs[0].MIG = &device.MIG{}
	broken := errors.New("bad sector")
	if _, err := (Rules{Records: records{err: broken}}).Preview(node); !errors.Is(err, broken) || !strings.Contains(err.Error(), "gpu-0000-1b-00-0") {
		t.Error(err)
	}
}

func TestTheTableOfANodeWithoutGPUsHasNoHead(t *testing.T) {
	var out strings.Builder
	if err := WriteTable(&out, Preview{}); err != nil || strings.Contains(out.String(), "NAME") || !strings.Contains(out.String(), "CUDA unknown") {
		t.Errorf("%s, %v", out.String(), err)
	}
}

func TestTheSlicesAreThoseOfTheAPI(t *testing.T) {
	for given, want := range map[string]string{"node-1": "node-1", "": ""} {
		var out strings.Builder
		if err := WriteSlices(&out, previewOf(t, Rules{}, nodeWith("0000:1b:00.0")), "gpu.nvidia.com", given); err != nil {
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
	p := previewOf(t, Rules{}, nodeWith("0000:1b:00.0"))
	if WriteTable(full{}, p) == nil || WriteSlices(full{}, p, "d", "n") == nil {
		t.Error("it went unnoticed")
	}
}
