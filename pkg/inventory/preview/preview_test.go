package preview

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

// previewOf returns the preview of what this node offers under the rules. It ends the test after an
// error.
func previewOf(t *testing.T, r Rules, node nvidia.Node) Offer {
	t.Helper()
	p, err := r.Offer(node)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// configured returns rules with these MIG policies and share settings, and without any claim.
func configured(t *testing.T, policies, shares string) Rules {
	t.Helper()
	p, err := settings.ParseMIG(policies)
	if err != nil {
		t.Fatal(err)
	}
	s, err := settingstest.Shares(shares)
	if err != nil {
		t.Fatal(err)
	}
	return Rules{Policies: p, Shares: s}
}

// records acts as the claims' checkpoint records. Claims own the MIG instances with these IDs, and
// have shares of these devices. inUse is the GPU that a claim has.
type records struct {
	inUse     string
	inPods    string // in use by containers
	instances []uint32
	shares    map[string]bool
	err       error
}

func (r records) OwnedInstances(_ string, all []device.Instance) ([]device.Instance, error) {
	var ours []device.Instance
	for _, in := range all {
		if slices.Contains(r.instances, in.ID) {
			ours = append(ours, in)
		}
	}
	return ours, r.err
}

func (r records) InUse(gpu string) (bool, error) { return gpu == r.inUse || gpu == r.inPods, nil }

func (r records) InUseByContainers(gpu string) (bool, error) { return gpu == r.inPods, nil }

func (r records) AllocatedDevices() (device.Allocations, error) {
	return device.Allocations{Shared: r.shares}, nil
}

func TestWriteTable(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0")
	node.GPUs[0].NUMANode, node.GPUs[0].PCIeRoot = ptr.To(0), "pci0000:15"
	node.GPUs[1].MemoryBytes = 0
	node.Problems = []nvidia.Problem{{PCIAddress: "0000:52:00.0", Message: "MIG mode is on"}, {Message: "lost"}}
	node.Omissions = []nvidia.Omission{{Kind: nvidia.MissingFile, Name: "nvidia-smi", Message: "it was not found"}}
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

Not offered, or only in part:
  0000:52:00.0: MIG mode is on
  lost

Left out:
  nvidia-smi: it was not found
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestWriteTableShowsMIGLayout(t *testing.T) {
	node := nodeWith("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:9b:00.0")
	small := device.Profile{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Size: 1, Starts: []uint32{0, 1}}
	large := device.Profile{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Size: 4, Starts: []uint32{0, 4}}
	node.GPUs[0].MIG = &device.MIG{Enabled: true, Pending: true, Profiles: []device.Profile{large, small}, Instances: []device.Instance{
		{ID: 1, ProfileID: 9, Placement: device.Placement{Start: 4, Size: 4}, Compute: []device.ComputeInstance{
			{Name: "1c.3g.40gb", Placement: device.Placement{Size: 1}, UUID: "MIG-a"},
			{ID: 1, Name: "2c.3g.40gb", Placement: device.Placement{Start: 1, Size: 2}, UUID: "MIG-b"},
		}},
		{ID: 7, ProfileID: 19, Placement: device.Placement{Size: 1}, Compute: []device.ComputeInstance{
			{Name: "1g.10gb", Placement: device.Placement{Size: 1}, UUID: "MIG-c"},
		}},
		{ID: 8, ProfileID: 19, Placement: device.Placement{Start: 1, Size: 1}},
	}}
	node.GPUs[1].MIG = &device.MIG{ModeFixed: true, Pending: true, Profiles: []device.Profile{small}}
	node.GPUs[2].MIG = &device.MIG{ReadOnly: true}
	rules := configured(t, "dynamic", "")
	rules.Records = records{instances: []uint32{7, 8}}
	var out strings.Builder
	if err := WriteTable(&out, previewOf(t, rules, node)); err != nil {
		t.Fatal(err)
	}
	_, layout, _ := strings.Cut(out.String(), "GPU-0000:9b:00.0\n")
	want := `
NAME              MIG MODE                           PROFILES
gpu-0000-1b-00-0  on                                 2 x 3g.40gb, 7 x 1g.10gb
gpu-0000-43-00-0  off (on after a reset)             7 x 1g.10gb
gpu-0000-52-00-0  off (controlled by the vGPU host)  -

INSTANCE                       ID  PLACEMENT  PROFILE     MADE FOR  UUID
gpu-0000-1b-00-0-mig-9-4-ci-0  1   4:4        1c.3g.40gb  an admin  MIG-a
gpu-0000-1b-00-0-mig-9-4-ci-1  1   4:4        2c.3g.40gb  an admin  MIG-b
gpu-0000-1b-00-0-mig-19-0      7   0:1        1g.10gb     a claim   MIG-c
gpu-0000-1b-00-0-mig-19-1      8   1:1        1g.10gb     a claim   none: no compute instance

NAME              MIG POLICY  DEVICES OFFERED
gpu-0000-1b-00-0  dynamic     1 x 1c.3g.40gb, 1 x 2c.3g.40gb, 1 x 1g.10gb
gpu-0000-43-00-0  dynamic     1 x whole
gpu-0000-52-00-0  dynamic     1 x whole
gpu-0000-9b-00-0  -           1 x whole

Not offered, or only in part:
  gpu-0000-1b-00-0: MIG instances exist that no claim created: the GPU is offered as partitioned
  gpu-0000-43-00-0: MIG mode is off, and only a GPU reset enables it on this card, which is pending
  gpu-0000-52-00-0: MIG instances can be used but not created here, as in a vGPU guest
`
	if diff := cmp.Diff(want, layout); diff != "" {
		t.Error(diff)
	}
}

// The preview must differ with the configuration and with the claims that have devices.
func TestPreviewFollowsConfigurationAndClaims(t *testing.T) {
	small := device.Profile{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 2, Size: 1, Starts: []uint32{0, 1}}
	instance := device.Instance{ID: 7, ProfileID: 19, Placement: device.Placement{Size: 1}, Compute: []device.ComputeInstance{
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
		"no configuration": {mig(), "", "", nil, "static 1 x whole", ""},
		"dynamic":          {mig(), "dynamic", "", nil, "dynamic 1 x whole, 2 x 1g.10gb", ""},
		"profile list": {
			mig(), "{policy: adopt, profiles: [1g.10gb]}", "", nil, "adopt(1g.10gb) 1 x whole, 2 x 1g.10gb", "",
		},
		"list with an unknown profile": {
			mig(), "{policy: dynamic, profiles: [3g.40gb]}", "", nil, "dynamic(3g.40gb) 1 x whole",
			"the GPU has no profile 3g.40gb, which policy dynamic(3g.40gb) names, " +
				"so policy static applies; its profiles are 1g.10gb",
		},
		"static": {mig(), "static", "", nil, "static 1 x whole", ""},
		"off for this GPU": {
			mig(), "rules: [{gpus: '0000:1b:00.0', policy: off}]", "", nil, "off 1 x whole", "",
		},
		"instance of an admin": {
			mig(instance), "dynamic", "", nil, "dynamic 1 x 1g.10gb",
			"MIG instances exist that no claim created: the GPU is offered as partitioned",
		},
		"instance of a claim": {mig(instance), "dynamic", "", records{instances: []uint32{7}}, "dynamic 1 x whole, 2 x 1g.10gb", ""},
		"instance of a claim, policy now off": {
			mig(instance), "off", "", records{instances: []uint32{7}}, "off 1 x 1g.10gb",
			"the policy offers whole GPUs only: waiting for claims that hold partitions",
		},
		"shared": {nil, "", "[{kind: shares, count: 4}]", nil, "- 1 x whole, 1 x whole in 4 shares", ""},
		"shared partitions": {
			mig(), "dynamic", "[{profile: '1g*', kind: shares, count: 3}]", nil,
			"dynamic 1 x whole, 2 x 1g.10gb, 2 x 1g.10gb in 3 shares", "",
		},
		"no longer shared, share held": {
			nil, "", "", records{shares: map[string]bool{gpu + "-share": false}},
			"- 1 x whole, 1 x whole in shares that claims hold, no new ones", "",
		},
		"in fractions": {nil, "", "[{kind: fractions}]", nil, "- 1 x whole, 1 x whole in fractions", ""},
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
			offer, why, _ := strings.Cut(offer, "\n\nNot offered, or only in part:\n")
			if got := strings.Join(strings.Fields(offer), " "); got != gpu+" "+c.offered {
				t.Errorf("offered: %q", got)
			}
			if c.why != "" {
				c.why = gpu + ": " + c.why
			}
			if got := strings.TrimSpace(why); got != c.why {
				t.Errorf("reason: %q", got)
			}
		})
	}
}

func TestTableSaysWhyGPUHasNoFractions(t *testing.T) {
	node := nodeWith("0000:1b:00.0")
	node.GPUs[0].CUDAComputeCapability = "6.1"
	var out strings.Builder
	if err := WriteTable(&out, previewOf(t, configured(t, "", "[{kind: fractions}]"), node)); err != nil {
		t.Fatal(err)
	}
	if want := "gpu-0000-1b-00-0: not in fractions: MPS cannot limit memory on GPUs before Volta"; !strings.Contains(out.String(), want) {
		t.Errorf("the table does not contain %q:\n%s", want, out.String())
	}
}

func TestPreviewReturnsErrorOfRecords(t *testing.T) {
	node := nodeWith("0000:1b:00.0")
	node.GPUs[0].MIG = &device.MIG{}
	broken := errors.New("bad sector")
	if _, err := (Rules{Records: records{err: broken}}).Offer(node); !errors.Is(err, broken) ||
		!strings.Contains(err.Error(), "gpu-0000-1b-00-0") {
		t.Error(err)
	}
}

func TestTableWithoutGPUsHasNoHeader(t *testing.T) {
	var out strings.Builder
	if err := WriteTable(&out, Offer{}); err != nil || strings.Contains(out.String(), "NAME") ||
		!strings.Contains(out.String(), "CUDA unknown") {
		t.Errorf("%s, %v", out.String(), err)
	}
}

func TestWriteSlicesWritesValidResourceSlices(t *testing.T) {
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

// full is a writer that returns an error for every write, like a full disk.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestFailedWriteIsAnError(t *testing.T) {
	p := previewOf(t, Rules{}, nodeWith("0000:1b:00.0"))
	if WriteTable(full{}, p) == nil || WriteSlices(full{}, p, "d", "n") == nil {
		t.Error("a write error was ignored")
	}
}

// nodeWith returns a node with a GPU without MIG at each address.
func nodeWith(addresses ...device.PCIAddress) nvidia.Node {
	n := nvidia.Node{Driver: device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}}
	for i, a := range addresses {
		n.GPUs = append(n.GPUs, nvidia.GPU{GPU: device.GPU{
			PCIAddress: a, UUID: "GPU-" + string(a), Minor: i, ProductName: "NVIDIA H200", MemoryBytes: 1 << 30,
		}})
	}
	return n
}
