package slices

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory/preview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

var update = flag.Bool("update", false, "write the models instead of comparing with them")

const (
	repository = "../../../.."
	simulator  = repository + "/test/nvmlsim"
	nodeName   = "node-1"
)

func TestMain(m *testing.M) {
	os.Exit(nodeharness.Main(m, nil)) //nolint:forbidigo // this process is the tests, or the child of one
}

func needSimulator(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("build the simulated library: %v\n%s", err, out)
	}
}

// scanned returns the result of a scan of a simulated node with n GPUs of a model. The GPUs are
// where the command assumes them.
func scanned(t *testing.T, models map[string]*model.GPU, key string, n int) nvidia.Node {
	t.Helper()
	root := t.TempDir()
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n"
	for i := range n {
		text += fmt.Sprintf("- {model: %s, pci: \"0000:%02x:00.0\", pciRoot: \"pci0000:00\"}\n", key, 0x10+i)
	}
	file := filepath.Join(root, "node.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := model.ReadNode(file, "slices")
	if err != nil {
		t.Fatal(err)
	}
	dev := filepath.Join(root, "machine", "dev")
	if err := os.MkdirAll(dev, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := layout.Up(layout.Options{
		Root: root, Models: models, Seed: "slices", Config: layout.Config{Kind: layout.Container, Node: node, Dev: dev},
		Sources: layout.Sources{Library: repository + "/build/nvmlsim/libnvidia-ml.so.1"},
	}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_DEV", filepath.Join(root, "driver", "dev"))
	result, err := nodeharness.Node{Root: root}.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Where the GPUs of such a node will be is unknown.
	for i := range result.GPUs {
		result.GPUs[i].PCIeRoot, result.GPUs[i].NUMANode = "", nil
	}
	return result
}

func readModels(t *testing.T) map[string]*model.GPU {
	t.Helper()
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	return models
}

// The models that the program brings are what a scan of these GPUs finds. The command prints for
// them what gpu-kubelet-plugin inventory prints on a node with two such GPUs.
func TestKnownModels(t *testing.T) {
	needSimulator(t)
	models := readModels(t)
	for key, m := range models {
		node := scanned(t, models, key, 2)
		var text bytes.Buffer
		if err := preview.ModelOf(nvidia.Node{Driver: node.Driver, GPUs: node.GPUs[:1]}).Write(&text); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join("models", key+".yaml")
		if *update {
			if err := os.WriteFile(file, text.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		want, err := os.ReadFile(file)
		if d := cmp.Diff(string(want), text.String()); d != "" || err != nil {
			t.Errorf("%s: %v. If that is intended, run this test with -update.\n%s", file, err, d)
			continue
		}
		variants := []Options{
			{MIGPolicy: "static"},
			{MIGPolicy: "static", Shares: "[{kind: fractions}]"},
			{MIGPolicy: "static", Shares: "[{kind: shares, count: 4}]"},
		}
		if m.MIG.Supported.Value {
			variants = append(variants, Options{MIGPolicy: "dynamic"}, Options{MIGPolicy: "dynamic", Shares: "[{kind: shares, count: 2}]"})
		}
		for _, o := range variants {
			o.Name, o.GPUs = nodeName, 2
			if d := cmp.Diff(specs(inventory(t, node, o)), specs(ofModel(t, key, o))); d != "" {
				t.Errorf("%s, %+v (-inventory +command):\n%s", key, o, d)
			}
		}
	}
	if got := Known(); len(got) != len(models) && !*update {
		t.Errorf("there are %v", got)
	}
}

// inventory returns what gpu-kubelet-plugin inventory prints on the node.
func inventory(t *testing.T, node nvidia.Node, o Options) []resourceapi.ResourceSlice {
	t.Helper()
	rules, err := o.rules()
	if err != nil {
		t.Fatal(err)
	}
	offer, err := rules.Offer(node)
	if err != nil {
		t.Fatal(err)
	}
	return offer.Slices(device.DriverName, o.Name)
}

func ofModel(t *testing.T, name string, o Options) []resourceapi.ResourceSlice {
	t.Helper()
	m, err := Model(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := OfModel(*m, o)
	if err != nil {
		t.Fatal(err)
	}
	return got.Slices
}

// specs returns the slices' specs with UUIDs replaced, which no two nodes share. It leaves out the
// types for ResourcePoolStatusRequest, which depend on a gate of the cluster and are only counted.
func specs(all []resourceapi.ResourceSlice) []resourceapi.ResourceSliceSpec {
	var specs []resourceapi.ResourceSliceSpec
	for _, s := range all {
		spec := *s.Spec.DeepCopy()
		spec.Pool.Generation, spec.PartitionTypeAttribute = 0, nil
		for _, d := range spec.Devices {
			delete(d.Attributes, resourceapi.QualifiedName(device.PartitionTypes))
			for _, name := range []resourceapi.QualifiedName{"uuid", attrParentUUID} {
				if v := d.Attributes[name].StringValue; v != nil && *v != device.UUIDNotCreated {
					d.Attributes[name] = resourceapi.DeviceAttribute{StringValue: ptr.To("a UUID")}
				}
			}
		}
		specs = append(specs, spec)
	}
	slices.SortFunc(specs, func(a, b resourceapi.ResourceSliceSpec) int {
		first := func(s resourceapi.ResourceSliceSpec) string {
			if len(s.Devices) == 0 {
				return ""
			}
			return s.Devices[0].Name
		}
		return strings.Compare(first(a), first(b))
	})
	return specs
}

// A model of a node, and the node itself, give what the running plugin publishes to the API server.
func TestSlicesAreWhatThePluginPublishes(t *testing.T) {
	needSimulator(t)
	host := nodeharness.New(t, "0000:1b:00.0", "0000:43:00.0")
	t.Setenv("NVMLSIM_DEV", filepath.Join(host.Root, "driver", "dev"))
	api := nodeharness.NewAPI()
	running, err := host.Start(t.Context(), api)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := running.Stop(); err != nil {
			t.Error(err)
		}
	})
	var published []resourceapi.ResourceSlice
	for len(published) == 0 || int64(len(published)) != published[0].Spec.Pool.ResourceSliceCount {
		list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		published = list.Items
		select {
		case <-t.Context().Done():
			t.Fatal("the plugin published nothing")
		case <-time.After(20 * time.Millisecond):
		}
	}
	node := *published[0].Spec.NodeName

	scan, err := host.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "model.yaml")
	var text bytes.Buffer
	if err := preview.ModelOf(scan).Write(&text); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	o := Options{Name: node, MIGPolicy: "dynamic"} // as nodeharness configures it
	if d := cmp.Diff(specs(published), specs(ofModel(t, file, o))); d != "" {
		t.Errorf("from the model (-published +command):\n%s", d)
	}

	live := &fleet.Snapshot{Nodes: []*corev1.Node{fleettest.New().PlainNode(node)}}
	for i := range published {
		live.Slices = append(live.Slices, &published[i])
	}
	fromNode, err := OfNode(live, node, node)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(specs(published), specs(fromNode.Slices)); d != "" {
		t.Errorf("from the node (-published +command):\n%s", d)
	}
	checkKarpenter(t, published, ForKarpenter("h100", fromNode))
}

// checkKarpenter compares a template with the published slices: it has each device with its name,
// capacity and counters, and no attribute that differs on the next node.
func checkKarpenter(t *testing.T, published []resourceapi.ResourceSlice, got DynamicResourceTemplate) {
	t.Helper()
	want := map[string]resourceapi.Device{}
	sets := 0
	for _, s := range published {
		sets += len(s.Spec.SharedCounters)
		for _, d := range s.Spec.Devices {
			want[d.Name] = d
		}
	}
	for _, s := range got.Spec.ResourceSliceTemplates {
		sets -= len(s.SharedCounters)
		for _, d := range s.Devices {
			w := want[d.Name]
			delete(want, d.Name)
			if !cmp.Equal(w.Capacity, d.Capacity) || !cmp.Equal(w.ConsumesCounters, d.ConsumesCounters) {
				t.Errorf("%s has another capacity or counters", d.Name)
			}
			for name, value := range w.Attributes {
				kept, has := d.Attributes[name]
				perNode := name == attrParentUUID || name == device.AttrPCIBusID || name == device.AttrPCIeRoot ||
					name == "uuid" && *value.StringValue != device.UUIDNotCreated
				if has == perNode || has && !cmp.Equal(kept, value) {
					t.Errorf("%s: attribute %s is %v", d.Name, name, kept)
				}
			}
		}
	}
	if len(want) > 0 || sets != 0 {
		t.Errorf("%d devices and %d counter sets are missing", len(want), sets)
	}
	// Two GPUs behind one PCIe root: one binding for the root, and two for what is of one GPU.
	count := map[resourceapi.FullyQualifiedName][]int{}
	for _, b := range got.Spec.AttributeBindings {
		count[b.Attribute] = append(count[b.Attribute], len(b.Devices))
	}
	half := len(publishedDevices(published)) / 2
	expected := map[resourceapi.FullyQualifiedName][]int{
		"gpu.nvidia.com/parentUUID": {half, half}, "resource.kubernetes.io/pciBusID": {half, half},
		"resource.kubernetes.io/pcieRoot": {2 * half},
	}
	if d := cmp.Diff(expected, count); d != "" {
		t.Error(d)
	}
}

func publishedDevices(all []resourceapi.ResourceSlice) []resourceapi.Device {
	var devices []resourceapi.Device
	for _, s := range all {
		devices = append(devices, s.Spec.Devices...)
	}
	return devices
}

func TestNodeThatCannotBeATemplate(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "dynamic", "")
	c.Node("n2", fleettest.H100, 1, "static", "")
	c.PlainNode("cpu")
	c.Taint("n2", "", "gpu.nvidia.com/xid", "79", resourceapi.DeviceTaintEffectNoSchedule)
	c.Held("train", "n2", fleettest.Device(0))
	s := &fleet.Snapshot{Nodes: c.Nodes, Slices: c.Slices[1:], Claims: c.Claims}
	for node, want := range map[string]string{
		"n1": "are being updated: 1 of 2", "cpu": "has no slices", "h100": "neither a node nor a model. Models: a100",
	} {
		if _, err := OfNode(s, node, "new"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", node, err, want)
		}
	}
	got, err := OfNode(s, "n2", "new")
	if err != nil {
		t.Fatal(err)
	}
	spec := got.Slices[0].Spec
	if len(spec.Devices[0].Taints) > 0 || *spec.NodeName != "new" || spec.Pool.Name != "new" || len(got.Notes) != 1 {
		t.Errorf("%+v, %v", spec, got.Notes)
	}
}

func TestNumberOfGPUs(t *testing.T) {
	one, err := Model("t4-16gb")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Name: "n", MIGPolicy: "static"}
	for n, want := range map[int]int{0: 1, 1: 1, 8: 8, 64: 64} {
		o.GPUs = n
		got, err := OfModel(*one, o)
		if err != nil {
			t.Fatal(err)
		}
		names := map[string]bool{}
		for _, d := range publishedDevices(got.Slices) {
			names[d.Name] = true
		}
		if len(names) != want {
			t.Errorf("--gpus %d: %d devices", n, len(names))
		}
	}
	two := *one
	two.GPUs = append(slices.Clone(one.GPUs), one.GPUs...)
	for n, m := range map[int]preview.Model{-1: *one, 65: *one, 3: two} {
		o.GPUs = n
		if _, err := OfModel(m, o); err == nil {
			t.Errorf("%d GPUs of a model with %d", n, len(m.GPUs))
		}
	}
}
