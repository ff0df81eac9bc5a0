// Package slices answers what a node publishes that does not exist yet, so that an autoscaler can
// decide whether such a node would help. The answer comes from a model of the hardware, by the code
// with which the plugin publishes, or from a node that exists.
package slices

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory/preview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// known are models of one GPU, as gpu-kubelet-plugin inventory -o model prints them for simulated
// GPUs. test/nvmlsim/models names the source of each value.
//
//go:embed models/*.yaml
var known embed.FS

const maxGPUs = 64

// Known returns the names of the models that the program brings.
func Known() []string {
	files, _ := fs.Glob(known, "models/*.yaml") // the pattern is valid
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(f, "models/"), ".yaml"))
	}
	return names
}

// Options say how the node will be configured.
type Options struct {
	// Name is the name of the node in the slices.
	Name string
	// GPUs is the number of GPUs. 0 means those of the model.
	GPUs int
	// MIGPolicy and Shares are the settings mig and shares of the plugin, in YAML.
	MIGPolicy, Shares string
}

// rules returns what decides which devices the node offers.
func (o Options) rules() (preview.Rules, error) {
	policies, err := settings.ParseMIG(o.MIGPolicy)
	if err != nil {
		return preview.Rules{}, fmt.Errorf("--mig-policy: %w", err)
	}
	d, err := settings.Parse([]byte("shares: " + o.Shares))
	if err != nil {
		return preview.Rules{}, fmt.Errorf("--shares: %w", err)
	}
	set, err := d.Compile("")
	return preview.Rules{Policies: policies, Shares: set.Shares}, err
}

// Template is what a node will publish.
type Template struct {
	Slices []resourceapi.ResourceSlice
	// Notes say why less is published than the settings ask for, and what may differ.
	Notes []string
}

// Model returns the model with this name, or of this file. It returns nil if name is neither, and
// so can only be a node.
func Model(name string) (*preview.Model, error) {
	var text []byte
	var err error
	switch {
	case strings.ContainsAny(name, `/\`) || strings.HasSuffix(name, ".yaml"):
		text, err = os.ReadFile(name)
	case slices.Contains(Known(), name):
		text, err = known.ReadFile("models/" + name + ".yaml")
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	m, err := preview.ReadModel(text)
	if err != nil {
		return nil, fmt.Errorf("%s is no model that gpu-kubelet-plugin inventory -o model wrote: %w", name, err)
	}
	return &m, nil
}

// OfModel returns what a node of this model will publish.
func OfModel(m preview.Model, o Options) (Template, error) {
	if err := resize(&m, o.GPUs); err != nil {
		return Template{}, err
	}
	rules, err := o.rules()
	if err != nil {
		return Template{}, err
	}
	offer, err := rules.Offer(m.Node())
	if err != nil {
		return Template{}, err
	}
	t := Template{Slices: offer.Slices(device.DriverName, o.Name)}
	reasons := offer.Reasons()
	for _, gpu := range slices.Sorted(maps.Keys(reasons)) {
		for _, why := range reasons[gpu] {
			t.Notes = append(t.Notes, gpu+": "+why)
		}
	}
	return t, nil
}

// resize gives the model this number of GPUs.
func resize(m *preview.Model, n int) error {
	switch {
	case n == 0 || n == len(m.GPUs):
		return nil
	case n < 0 || n > maxGPUs:
		return fmt.Errorf("a node cannot have %d GPUs: use 1 to %d", n, maxGPUs)
	case n < len(m.GPUs):
		m.GPUs = m.GPUs[:n]
		return nil
	case len(m.GPUs) > 1:
		return fmt.Errorf("the model has %d GPUs, and where others would be is unknown: use a smaller number", len(m.GPUs))
	}
	one := m.GPUs[0]
	one.PCIeRoot, one.NUMANode = "", nil // where the GPUs are is unknown
	m.GPUs = nil
	for i := range n {
		one.PCIAddress = device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+i))
		m.GPUs = append(m.GPUs, one)
	}
	return nil
}

// OfNode returns what a new node like this one will publish: its slices without taints.
func OfNode(s *fleet.Snapshot, node, name string) (Template, error) {
	if s.Node(node) == nil {
		return Template{}, fmt.Errorf("%s is neither a node nor a model. Models: %s", node, strings.Join(Known(), ", "))
	}
	newest := fleet.Newest(s.SlicesOf()[node])
	if len(newest) == 0 {
		return Template{}, fmt.Errorf("node %s has no slices of %s. kubectl gpu doctor may say why", node, device.DriverName)
	}
	if want := newest[0].Spec.Pool.ResourceSliceCount; int64(len(newest)) != want {
		return Template{}, fmt.Errorf("the slices of node %s are being updated: %d of %d are there. Try again", node, len(newest), want)
	}
	// Slices with counters come first, as the plugin publishes them.
	slices.SortStableFunc(newest, func(a, b *resourceapi.ResourceSlice) int {
		return min(1, len(b.Spec.SharedCounters)) - min(1, len(a.Spec.SharedCounters))
	})
	var t Template
	for i, published := range newest {
		slice := resourceapi.ResourceSlice{Spec: *published.Spec.DeepCopy()}
		slice.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"}
		slice.Name = fmt.Sprintf("%s-%s-%d", name, device.DriverName, i)
		slice.Spec.NodeName, slice.Spec.Pool.Name, slice.Spec.Pool.Generation = ptr.To(name), name, 1
		for j := range slice.Spec.Devices {
			slice.Spec.Devices[j].Taints = nil
		}
		t.Slices = append(t.Slices, slice)
	}
	for id := range s.Holders() {
		if id.Driver == device.DriverName && id.Pool == node {
			t.Notes = append(t.Notes, fmt.Sprintf("claims have devices of node %s. If its MIG policy or shares changed since, "+
				"a new node publishes other devices", node))
			break
		}
	}
	return t, nil
}
