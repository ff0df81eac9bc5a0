package device

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// maxKeys is how many attributes and capacities a device may have together: as many as a partition
// has now. The API server rejects the whole slice of a device with more than 32, and selectors may
// use every published key. So a new key, which can never go again, raises this number on purpose.
const maxKeys = 26

// requiredKeys maps each type of device to the keys that all its devices must have, even if most
// facts about the GPU are unknown. Of the keys of resource.kubernetes.io, only pciBusID is
// required.
var requiredKeys = map[string]struct{ attributes, capacities []string }{
	"gpu":       {wholeKeys, capacityKeys},
	"mig":       {partitionKeys, capacityKeys},
	"vfio":      {append(slices.Clone(wholeKeys), "vendorID", "deviceID", "iommuFDEnabled"), []string{"addressableMemory"}},
	"gpu-share": {append(slices.Clone(wholeKeys), shareKeys...), nil},
	"mig-share": {append(slices.Clone(partitionKeys), shareKeys...), nil},
}

var (
	wholeKeys = []string{
		"type", "uuid", "parentUUID", "productName", "brand", "architecture", "addressingMode", "cudaComputeCapability",
		"driverVersion", "cudaDriverVersion", "driverVersionString", "resource.kubernetes.io/pciBusID",
	}
	partitionKeys = append(slices.Clone(wholeKeys), "profile", "profileID", "placementStart", "placementSize")
	shareKeys     = []string{"sharing", "memoryLimit"}
	capacityKeys  = []string{"memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"}
	// shareCapacities maps the value of a share device's attribute sharing to the capacities that the
	// device must have.
	shareCapacities = map[string][]string{"MPS": {"cores", "memory"}, "TimeSlicing": {"shares"}}
	optionalKeys    = []string{string(AttrPCIeRoot), string(AttrNUMANode)}
)

// everyDevice calls visit with each device that a GPU of the model can be offered as: whole,
// placements, existing MIG instances and shares. It does so for a GPU about which all facts are
// known, and for a GPU about which few are.
func everyDevice(t *testing.T, m *model.GPU, visit func(resourceapi.Device)) {
	t.Helper()
	full := fromModel(m)
	full.PCIAddress, full.UUID, full.PCIeRoot, full.NUMANode = "0000:01:00.0", "GPU-1", "pci0000:00", ptr.To(1)
	full.Passthrough = &Passthrough{VendorID: 0x10de, DeviceID: 0x2330, AddressableMemory: 1 << 37, IOMMUFD: true}
	bare := GPU{
		PCIAddress: full.PCIAddress, UUID: full.UUID, ProductName: full.ProductName, Brand: "Unknown", Architecture: "Unknown", MIG: full.MIG,
	}
	versions := []Driver{{Version: m.TypicalDriverVersion.Value, CUDAVersion: m.TypicalCUDAVersion.Value}, {Version: "vgpu-x"}}
	withoutDriver := GPU{PCIAddress: full.PCIAddress, Passthrough: full.Passthrough}
	for _, slice := range Slices(Offer([]Offering{{GPU: withoutDriver, Layout: Layout{VFIO: true}}}), Driver{}, false) {
		visit(slice.Devices[0])
	}
	for i, g := range []GPU{full, bare} {
		for _, rules := range []string{
			"", "[{kind: fractions}, {profile: '*', kind: fractions}]", "[{kind: shares, count: 4}, {profile: '*', kind: shares, count: 4}]",
		} {
			for _, o := range layoutsOf(g) {
				o.Shares = shareRules(t, rules)
				for _, slice := range Slices(Offer([]Offering{o}), versions[i], true) {
					for _, d := range slice.Devices {
						visit(d)
					}
				}
			}
		}
	}
}

// layoutsOf returns the GPU offered in three ways: as a whole, also to virtual machines, with all
// placements, and with existing MIG instances. These are one of each profile, and one of a profile
// that the driver does not list, as in a vGPU guest.
func layoutsOf(g GPU) []Offering {
	layouts := []Layout{{Whole: true, VFIO: true}}
	if g.MIG != nil {
		instances := []Instance{{ID: 99, ProfileID: 77, Compute: []ComputeInstance{{Name: "1c.9g.99gb", UUID: "MIG-guest"}}}}
		for i, p := range g.MIG.Profiles {
			uuid := fmt.Sprintf("MIG-%d", i)
			instances = append(instances, Instance{
				ID: p.ID, ProfileID: p.ID, Placement: Placement{p.Starts[0], p.Size},
				Compute: []ComputeInstance{{Name: p.Name, UUID: uuid, Multiprocessors: 1}},
			})
		}
		layouts = append(layouts, Layout{Whole: true, Placements: true}, Layout{Instances: instances})
	}
	var offerings []Offering
	for _, l := range layouts {
		offerings = append(offerings, Offering{GPU: g, Layout: l})
	}
	return offerings
}

func forEachModel(t *testing.T, test func(t *testing.T, known *model.GPU)) {
	t.Helper()
	models := readModels(t)
	for _, key := range slices.Sorted(maps.Keys(models)) {
		t.Run(key, func(t *testing.T) { test(t, models[key]) })
	}
}

// All devices of a type must have the same keys. If a selector uses a key that one device lacks,
// the scheduling of the Pod stops on all nodes.
func TestDevicesOfOneTypeHaveSameKeys(t *testing.T) {
	forEachModel(t, func(t *testing.T, m *model.GPU) {
		seen := map[string]bool{}
		everyDevice(t, m, func(d resourceapi.Device) {
			kind := ptr.Deref(d.Attributes["type"].StringValue, "")
			seen[kind] = true
			if n := len(d.Attributes) + len(d.Capacity); n > maxKeys {
				t.Errorf("%s has %d attributes and capacities, want at most %d", d.Name, n, maxKeys)
			}
			delete(d.Attributes, resourceapi.QualifiedName(PartitionTypes))
			wantCapacities := requiredKeys[kind].capacities
			if sharing, shared := d.Attributes["sharing"]; shared {
				wantCapacities = shareCapacities[ptr.Deref(sharing.StringValue, "")]
			}
			if diff := cmp.Diff(sorted(requiredKeys[kind].attributes), keysOf(d.Attributes)); diff != "" {
				t.Errorf("attributes of %s (%s):\n%s", d.Name, kind, diff)
			}
			if diff := cmp.Diff(sorted(wantCapacities), keysOf(d.Capacity)); diff != "" {
				t.Errorf("capacities of %s (%s):\n%s", d.Name, kind, diff)
			}
		})
		kinds := []string{"gpu", "gpu-share", "vfio"}
		if m.MIG.Supported.Value {
			kinds = append(kinds, "mig", "mig-share")
		}
		if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, sorted(kinds)) {
			t.Errorf("checked devices of types %v, want %v", got, kinds)
		}
	})
}

func sorted(keys []string) []string { return slices.Sorted(slices.Values(keys)) }

// keysOf returns the sorted keys of the given attributes or capacities, without the optional keys.
func keysOf[V any](of map[resourceapi.QualifiedName]V) []string {
	var keys []string
	for name := range of {
		if !slices.Contains(optionalKeys, string(name)) {
			keys = append(keys, string(name))
		}
	}
	return sorted(keys)
}

// selectors maps types of devices to selectors. They are from the examples and tests of NVIDIA's
// DRA driver (https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu, demo/specs, site/content,
// test*), plus one for each key that NVIDIA's DRA driver publishes.
var selectors = map[string][]string{
	"gpu": {
		`device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*a100.*$')`,
		`device.attributes["gpu.nvidia.com"].productName == "NONEXISTENT-GPU-XYZ"`,
		`device.attributes["gpu.nvidia.com"].driverVersion.compareTo(semver("550.0.0")) >= 0`,
		`device.attributes["gpu.nvidia.com"].uuid == "GPU-2fa81118-5a5f-aa66-7660-471eed407181"`,
		`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("40Gi")) >= 0`,
		`device.attributes['gpu.nvidia.com'].architecture == 'Hopper' && ` +
			`device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity("80Gi"))`,
		`device.attributes["gpu.nvidia.com"].brand == "Nvidia"`,
		`device.attributes["gpu.nvidia.com"].addressingMode == "HMM"`,
		`device.attributes["gpu.nvidia.com"].cudaComputeCapability.isGreaterThan(semver("8.9.0"))`,
		`device.attributes["gpu.nvidia.com"].cudaDriverVersion.compareTo(semver("13.0.0")) >= 0`,
		`device.attributes["resource.kubernetes.io"].pciBusID == "0000:65:00.0"`,
		`device.capacity["gpu.nvidia.com"].multiprocessors.isGreaterThan(quantity("100"))`,
	},
	"mig": {
		`device.attributes['gpu.nvidia.com'].profile == '1g.5gb'`,
		`device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig' && ` +
			`device.attributes['gpu.nvidia.com'].profile == '1g.12gb'`,
		`device.capacity['gpu.nvidia.com'].multiprocessors.isLessThan(quantity("30"))`,
		`device.capacity['gpu.nvidia.com'].multiprocessors.isGreaterThan(quantity("10")) && ` +
			`device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity("10Gi"))`,
		`device.attributes["gpu.nvidia.com"].uuid == "MIG-1a2b3c4d-5e6f-7a8b-9c0d-1e2f3a4b5c6d"`,
		`device.attributes["gpu.nvidia.com"].parentUUID == "GPU-2fa81118-5a5f-aa66-7660-471eed407181"`,
		`device.attributes["gpu.nvidia.com"].addressingMode == "ATS"`,
		`device.attributes["gpu.nvidia.com"].driverVersion.compareTo(semver("550.0.0")) >= 0`,
		`device.capacity["gpu.nvidia.com"].decoders.compareTo(quantity("1")) >= 0`,
	},
	"vfio": {
		`device.attributes["gpu.nvidia.com"].deviceID == "0x2330" && device.attributes["gpu.nvidia.com"].vendorID == "0x10de"`,
		`device.attributes["gpu.nvidia.com"].iommuFDEnabled`,
		`device.attributes["gpu.nvidia.com"].uuid == "b4f1d0a8-0000-5000-8000-000000000000"`,
		`device.attributes["gpu.nvidia.com"].productName.lowerAscii().matches('^.*a100.*$')`,
		`device.capacity["gpu.nvidia.com"].addressableMemory.compareTo(quantity("40Gi")) >= 0`,
		`device.attributes["resource.kubernetes.io"].pciBusID == "0000:65:00.0"`,
	},
	// The selectors of a device class are evaluated on the devices of all types.
	"": {
		`device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'`,
		`device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'`,
		`device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'vfio'`,
		`device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type in ["gpu-share", "mig-share"]`,
	},
}

func TestExampleSelectorsEvaluateOnEveryDevice(t *testing.T) {
	ours := exampleSelectors(t)
	compiler := cel.GetCompiler(cel.Features{})
	programs := map[string][]cel.CompilationResult{}
	for _, all := range []map[string][]string{selectors, ours} {
		for kind, expressions := range all {
			for _, e := range expressions {
				r := compiler.CompileCELExpression(e, cel.Options{})
				if r.Error != nil {
					t.Fatalf("%s: %v", e, r.Error)
				}
				r.Expression = e
				programs[kind] = append(programs[kind], r)
			}
		}
	}
	forEachModel(t, func(t *testing.T, m *model.GPU) {
		everyDevice(t, m, func(d resourceapi.Device) {
			// The selectors of a claim are evaluated only on devices that its device class selects.
			kind := ptr.Deref(d.Attributes["type"].StringValue, "")
			in := cel.Device{Driver: driverName, AllowMultipleAllocations: d.AllowMultipleAllocations,
				Attributes: d.Attributes, Capacity: d.Capacity}
			for _, p := range slices.Concat(programs[kind], programs[""]) {
				if _, _, err := p.DeviceMatches(t.Context(), in); err != nil {
					t.Errorf("%s on %s (%s): %v", p.Expression, d.Name, kind, err)
				}
			}
		})
	})
}

// exampleSelectors returns the selectors in the manifests of docs/examples. It maps each type of
// device to the selectors that are evaluated on it.
func exampleSelectors(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no examples", err)
	}
	types := map[string][]string{driverName: {"gpu"}, migClass: {"mig"}, sharedClass: {"gpu-share", "mig-share"}, vfioClass: {"vfio"}}
	found, n := map[string][]string{}, 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq(string(data), "\n---\n") {
			var content any
			if err := yaml.Unmarshal([]byte(document), &content); err != nil {
				t.Fatal(file, err)
			}
			eachSelector(content, func(class, expression string) {
				n++
				for _, kind := range types[class] {
					found[kind] = append(found[kind], expression)
				}
			})
		}
	}
	if n < 8 || len(found) < 3 {
		t.Fatalf("%d selectors in the examples: %v", n, found)
	}
	return found
}

// eachSelector calls visit with the device class and the expression of each selector in a manifest.
func eachSelector(content any, visit func(class, expression string)) {
	switch c := content.(type) {
	case []any:
		for _, v := range c {
			eachSelector(v, visit)
		}
	case map[string]any:
		class, _ := c["deviceClassName"].(string)
		all, _ := c["selectors"].([]any)
		for _, s := range all {
			if of, ok := s.(map[string]any)["cel"].(map[string]any); ok && class != "" {
				visit(class, of["expression"].(string))
			}
		}
		for _, v := range c {
			eachSelector(v, visit)
		}
	}
}
