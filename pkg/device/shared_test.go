package device

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// sharing returns offerings of the GPUs under the policy dynamic, with these share rules.
func sharing(t *testing.T, rules string, gpus ...GPU) []Offering {
	t.Helper()
	offerings := dynamic(gpus...)
	for i := range offerings {
		offerings[i].Shares = shareRules(t, rules)
	}
	return offerings
}

// shareRules returns the rules of the setting "shares" with this value in YAML.
func shareRules(t *testing.T, value string) ShareRules {
	t.Helper()
	r, errs := NewShareRules(fromYAML[[]ShareRule](t, value), nil)
	if errs != nil {
		t.Fatal(value, errs)
	}
	return r
}

// fromYAML returns the value that the YAML text has.
func fromYAML[T any](t *testing.T, text string) (value T) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(text), &value); err != nil {
		t.Fatal(text, err)
	}
	return value
}

// node returns one GPU of each model in keys.
func node(t *testing.T, keys ...string) []GPU {
	t.Helper()
	return nodeOf(readModels(t), keys...)
}

func nodeOf(models map[string]*model.GPU, keys ...string) []GPU {
	gpus := make([]GPU, len(keys))
	for i, key := range keys {
		gpus[i] = fromModel(models[key])
		gpus[i].PCIAddress, gpus[i].UUID = PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x20+i)), fmt.Sprintf("GPU-%d", i)
	}
	return gpus
}

const (
	h100Key = "h100-sxm5-80gb"
	l40sKey = "l40s-48gb"

	firstGPU, secondGPU = "gpu-0000-20-00-0", "gpu-0000-21-00-0"
)

func TestPublishedShare(t *testing.T) {
	gpus := node(t, l40sKey)
	var published []string
	for _, rules := range []string{"[{kind: fractions}]", "[{kind: shares, count: 4}]"} {
		shapes := Offer(sharing(t, rules, gpus...))
		if len(shapes) != 2 || shapes[1].GPU().UUID != gpus[0].UUID {
			t.Fatalf("%s: %v", rules, shapes)
		}
		d := shapes[1].Device(Driver{})
		for name := range d.Attributes {
			if !slices.Contains([]resourceapi.QualifiedName{"type", "sharing", "memoryLimit", "uuid", "parentUUID"}, name) {
				delete(d.Attributes, name)
			}
		}
		data, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		published = append(published, string(data))
	}
	of := func(attributes, capacity string) string {
		return `{"name":"gpu-0000-20-00-0-share","attributes":{` + attributes + `,"parentUUID":{"string":"GPU-0"},"sharing":` + "%s" +
			`,"type":{"string":"gpu-share"},"uuid":{"string":"GPU-0"}},"capacity":{` + capacity +
			`},"consumesCounters":[{"counterSet":"gpu-0000-20-00-0","counters":{"memory":{"value":"46068Mi"}}}],"allowMultipleAllocations":true}`
	}
	want := []string{
		fmt.Sprintf(of(`"memoryLimit":{"string":"process"}`,
			`"cores":{"value":"100","requestPolicy":{"default":"0","validRange":{"min":"0","max":"100","step":"1"}}},`+
				`"memory":{"value":"44736Mi","requestPolicy":{"default":"1Gi",`+
				`"validRange":{"min":"1Gi","max":"44736Mi","step":"64Mi"}}}`), `{"string":"MPS"}`),
		fmt.Sprintf(of(`"memoryLimit":{"string":"none"}`,
			`"shares":{"value":"4","requestPolicy":{"default":"1","validRange":{"min":"1","max":"4","step":"1"}}}`),
			`{"string":"TimeSlicing"}`),
	}
	if diff := cmp.Diff(want, published); diff != "" {
		t.Error(diff)
	}
}

// The attribute memoryLimit must say to what a memory limit applies. That is a whole container only
// if the node supports it, and never on a partition.
func TestMemoryLimitAttributeOfShares(t *testing.T) {
	gpus := node(t, h100Key, l40sKey)
	for i := range gpus {
		gpus[i].ContainerLimits = true
	}
	limits := map[string]string{}
	const rules = "[{kind: fractions}, {profile: 1g.10gb, kind: fractions}, {index: 1, kind: shares, count: 2}]"
	for _, s := range Offer(sharing(t, rules, gpus...)) {
		if limit, ok := s.Device(Driver{Version: "615.65.06", CUDAVersion: "13.4"}).Attributes["memoryLimit"]; ok {
			limits[s.Name()] = *limit.StringValue
		}
	}
	for name, want := range map[string]string{firstGPU + "-share": "container", secondGPU + "-share": "none",
		firstGPU + "-mig-19-6-share": "process"} {
		if limits[name] != want {
			t.Errorf("%s: %q, want %q", name, limits[name], want)
		}
	}
	inMIGMode := gpus[0]
	inMIGMode.MIG = &MIG{Enabled: true}
	if whole, _ := ParseName(firstGPU + "-share"); ContainerLimits(inMIGMode, whole) || !ContainerLimits(gpus[0], whole) {
		t.Error("container limits must apply to whole GPUs outside of MIG mode only")
	}
}

// A share device must have the attributes of its unshared device, except for the type, so that
// claims and classes can select it in the same way.
func TestShareHasAttributesOfItsDevice(t *testing.T) {
	shapes := Offer(sharing(t, "[{kind: fractions}, {profile: '*', kind: shares, count: 3}]", node(t, h100Key, l40sKey)...))
	devices := map[string]resourceapi.Device{}
	for _, s := range shapes {
		devices[s.Name()] = s.Device(Driver{Version: "580.65.06", CUDAVersion: "13.0"})
	}
	for name, d := range devices {
		own, isShare := strings.CutSuffix(name, "-share")
		if !isShare {
			if _, shared := devices[name+"-share"]; !shared {
				t.Errorf("%s is not shared", name)
			}
			continue
		}
		want := maps.Clone(devices[own].Attributes)
		kind := *want["type"].StringValue
		want["type"] = text(kind + "-share")
		want["sharing"], want["memoryLimit"] = text("MPS"), text("process")
		if kind == "mig" {
			want["sharing"], want["memoryLimit"] = text("TimeSlicing"), text("none")
		}
		if diff := cmp.Diff(want, d.Attributes); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	// The order must be whole GPUs, then their shares, then each partition before its shares.
	var names []string
	for _, s := range shapes[:6] {
		names = append(names, s.Name())
	}
	want := []string{firstGPU, secondGPU, firstGPU + "-share", secondGPU + "-share", firstGPU + "-mig-19-6", firstGPU + "-mig-19-6-share"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestUnsharedDevicesIgnoreShareRules(t *testing.T) {
	gpus := append(node(t, h100Key, h100Key, l40sKey, "a100-sxm4-80gb"), small())
	for i := range gpus {
		gpus[i].PCIAddress = PCIAddress(fmt.Sprintf("0000:%02x:00.0", i))
	}
	publish := func(o []Offering) string {
		data, err := json.Marshal(Slices(Offer(o), Driver{Version: "580.65.06"}, true))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	want := publish(dynamic(gpus...))
	for _, rules := range []string{
		"", "[{kind: 'off'}]", "[{profile: '*', kind: 'off'}]", "[{gpus: NVIDIA B200, kind: fractions}]",
		"[{kind: fractions}, {kind: 'off'}]", "[{index: 9, kind: shares, count: 2}]", "[{profile: '5g*', kind: fractions}]",
	} {
		if diff := cmp.Diff(want, publish(sharing(t, rules, gpus...))); diff != "" {
			t.Errorf("%q: %s", rules, diff)
		}
	}
	// A rule for one GPU must apply only to that GPU.
	for _, s := range Offer(sharing(t, "[{index: 2, kind: fractions}, {index: 1, profile: '7g*', kind: shares, count: 2}]", gpus...)) {
		_, shared := s.(Shared)
		if want := s.Name() == "gpu-0000-02-00-0-share" || s.Name() == "gpu-0000-01-00-0-mig-0-0-share"; shared != want {
			t.Errorf("%s is a share: %v", s.Name(), shared)
		}
	}
}

func TestSharesOfEveryModelPublishValidSlices(t *testing.T) {
	for key, known := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			g := fromModel(known)
			g.PCIAddress, g.UUID = "0000:01:00.0", "GPU-1"
			gpus := []GPU{g}
			if g.MIG != nil {
				gpus = migCapable(known, 9)
			}
			for _, rules := range []string{
				"[{kind: fractions}, {profile: '*', kind: fractions}]",
				"[{kind: shares, count: 2}, {profile: '*', kind: shares, count: 1000}]",
				"[{kind: fractions}, {profile: '1g*', kind: shares, count: 3}]",
			} {
				offerings := sharing(t, rules, gpus...)
				m := offered(t, offerings, Driver{Version: "580.65.06"})
				checkAPILimits(t, m)
				shared := 0
				for _, s := range Offer(offerings) {
					if _, is := s.(Shared); is {
						shared++
					}
				}
				if !known.HasMemoryInfo() && !strings.HasPrefix(rules, "[{kind: shares") {
					if shared > 0 {
						t.Errorf("%s: a GPU with unknown memory is offered in fractions", rules)
					}
					continue
				}
				if n := len(Offer(offerings)); !strings.Contains(rules, "1g*") && 2*shared != n || shared == 0 {
					t.Errorf("%s: %d of %d devices are shares", rules, shared, n)
				}
				existing := slices.Clone(offerings)
				for i := range existing {
					existing[i].GPU = withAllInstances(existing[i].GPU)
					existing[i].Layout, _ = Decide(existing[i].GPU, nil, Policy{Mode: PolicyStatic}, true)
				}
				m = offered(t, existing, Driver{Version: "580.65.06"})
				checkAPILimits(t, m)
			}
		})
	}
}

// withAllInstances returns the GPU with a MIG instance at every placement. No real GPU can have so
// many, but the slices must keep the API's limits whatever the hardware reports.
func withAllInstances(g GPU) GPU {
	if g.MIG == nil {
		return g
	}
	m := *g.MIG
	m.Enabled = true
	for i, p := range m.Profiles {
		for _, start := range p.Starts {
			m.Instances = append(m.Instances, Instance{
				ID: uint32(i)*16 + start, ProfileID: p.ID, Placement: Placement{start, p.Size},
				Compute: []ComputeInstance{{Name: "1c." + p.Name, UUID: "MIG-1"}, {ID: 1, Name: "1c." + p.Name, UUID: "MIG-2"}},
			})
		}
	}
	g.MIG = &m
	return g
}

// Devices with unusable memory sizes or names must not be offered in shares. Large memory sizes
// must not make invalid slices.
func TestDevicesThatCannotBeShared(t *testing.T) {
	for name, g := range map[string]GPU{
		"unknown memory": {PCIAddress: "0000:1b:00.0", Brand: "Nvidia", ProductName: "x", Architecture: "x"},
		"memory for one claim": {PCIAddress: "0000:1b:00.0", Brand: "Nvidia", ProductName: "x", Architecture: "x",
			UUID: "GPU-1", MemoryBytes: 3<<30 - 1},
		"name too long for a label": longName(),
	} {
		for _, s := range Offer(sharing(t, "[{kind: fractions}, {profile: '*', kind: fractions}]", g)) {
			if _, shared := s.(Shared); shared {
				t.Errorf("%s: %s is offered", name, s.Name())
			}
		}
	}
	g := GPU{PCIAddress: "0000:1b:00.0", Brand: "Nvidia", ProductName: "x", Architecture: "x", UUID: "GPU-1", MemoryBytes: 1<<64 - 1}
	m := offered(t, sharing(t, "[{kind: fractions}]", g), Driver{Version: "580.65.06"})
	checkAPILimits(t, m)
	if len(m.Slices) != 2 || len(m.Slices[1].Spec.Devices) != 2 {
		t.Error("a GPU with the maximum memory value is not shared")
	}
	m = offered(t, sharing(t, "[{kind: shares, count: 2}]", GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-1", Brand: "x", ProductName: "x",
		Architecture: "x"}), Driver{Version: "580.65.06"})
	checkAPILimits(t, m)
	if len(m.Slices) != 2 || len(m.Slices[1].Spec.Devices) != 2 {
		t.Error("plain shares need no memory")
	}
}

func longName() GPU {
	g := small()
	g.PCIAddress = "ffffffff:1b:00.0"
	g.MIG.Enabled, g.MIG.ReadOnly = true, true
	g.MIG.Profiles = []Profile{{ID: 1<<32 - 1, Name: "1g.10gb", MemoryBytes: 10 << 30}}
	g.MIG.Instances = []Instance{{ProfileID: 1<<32 - 1, Placement: Placement{1<<32 - 2, 1},
		Compute: []ComputeInstance{{ID: 1<<32 - 1, Name: "1c.1g.10gb", UUID: "MIG-1"}}}}
	return g
}

// Share devices must have other partition types than unshared devices, because devices of one
// partition type are counted together.
func TestSharesHaveOwnPartitionTypes(t *testing.T) {
	kinds := map[bool]sets.Set[string]{true: sets.New[string](), false: sets.New[string]()}
	offerings := sharing(t, "[{kind: fractions}, {profile: '*', kind: shares, count: 2}]", node(t, h100Key, l40sKey)...)
	for _, s := range Slices(Offer(offerings), Driver{}, true) {
		for _, d := range s.Devices {
			kinds[ptr.Deref(d.AllowMultipleAllocations, false)].Insert(*d.Attributes["partitionType"].StringValue)
		}
	}
	if both := kinds[true].Intersection(kinds[false]); both.Len() > 0 || kinds[true].Len() != 8+1 || kinds[false].Len() != 8+1 {
		t.Errorf("partition types of shares and of other devices: %v", kinds)
	}
}
