package device

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

func TestParsePCIAddressAcceptsNVMLAndSysfsForms(t *testing.T) {
	for given, want := range map[string]PCIAddress{
		"0000:1b:00.0":     "0000:1b:00.0",
		"00000000:1B:00.0": "0000:1b:00.0",
		"00000008:01:00.0": "0008:01:00.0",
		"10000:E1:00.7":    "10000:e1:00.7",
		"00010000:E1:00.7": "10000:e1:00.7",
	} {
		if got, err := ParsePCIAddress(given); err != nil || got != want {
			t.Errorf("%s is parsed as %s, %v; want %s", given, got, err, want)
		}
	}
	for _, given := range []string{"", "1b:00.0", "000:1b:00.0", "0000:1b:00.8", "0000:1b:00", "0000:1b:00.0 ",
		"000000000:1b:00.0", "gggg:1b:00.0", "0000-1b-00-0"} {
		if got, err := ParsePCIAddress(given); err == nil {
			t.Errorf("%q is parsed as %s", given, got)
		}
	}
}

func TestDeviceNameUsesFullPCIAddress(t *testing.T) {
	for address, want := range map[PCIAddress]string{
		"0000:1b:00.0":     "gpu-0000-1b-00-0",
		"0008:01:00.0":     "gpu-0008-01-00-0",
		"10000:e1:00.0":    "gpu-10000-e1-00-0",
		"ffffffff:ff:1f.7": "gpu-ffffffff-ff-1f-7",
	} {
		if got := (GPU{PCIAddress: address}).WholeName(); got != want {
			t.Errorf("%s is named %s, want %s", address, got, want)
		}
	}
}

func TestVersionConvertsDriverVersions(t *testing.T) {
	for given, want := range map[string]string{"580.65.06": "580.65.6", "13.0": "13.0.0", "12": "12.0.0", "9.0": "9.0.0"} {
		if got := *version(given).VersionValue; got != want {
			t.Errorf("%s becomes %s; want %s", given, got, want)
		}
	}
	for _, given := range []string{"", "1.2.3.4", "a.b", "1.-2", "1..2", "99999999999999999999"} {
		if got := *version(given).VersionValue; got != noVersion {
			t.Errorf("%q becomes %s", given, got)
		}
	}
}

func TestUnknownFactsHaveNeutralValues(t *testing.T) {
	d := Offer(dynamic(GPU{PCIAddress: "0000:01:00.0", UUID: "GPU-1"}))[0].Device(Driver{Version: "vgpu-x"})
	for _, name := range []resourceapi.QualifiedName{AttrPCIeRoot, AttrNUMANode} {
		if a, ok := d.Attributes[name]; ok {
			t.Errorf("%s is published as %v", name, a)
		}
	}
	for _, name := range []resourceapi.QualifiedName{"driverVersion", "cudaDriverVersion", "cudaComputeCapability"} {
		if got := ptr.Deref(d.Attributes[name].VersionValue, ""); got != "0.0.0" {
			t.Errorf("%s is %q, want a version older than all", name, got)
		}
	}
	for name, want := range map[resourceapi.QualifiedName]string{"driverVersionString": "vgpu-x", "addressingMode": "None"} {
		if got := ptr.Deref(d.Attributes[name].StringValue, ""); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	for name, c := range d.Capacity {
		if !c.Value.IsZero() {
			t.Errorf("%s is %s", name, c.Value.String())
		}
	}
	if len(d.Capacity) != 7 {
		t.Errorf("capacities are %v, want memory and six kinds of units", d.Capacity)
	}
}

func TestPublishedGPU(t *testing.T) {
	g := GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper",
		CUDAComputeCapability: "9.0", AddressingMode: "HMM", MemoryBytes: 81559 << 20, PCIeRoot: "pci0000:15", NUMANode: ptr.To(1),
		Engines: &Engines{Multiprocessors: 132, CopyEngines: 8, Decoders: 7, JPEGEngines: 7, OFAEngines: 1},
	}
	shape := Offer(dynamic(g))[0]
	data, err := json.Marshal(shape.Device(Driver{Version: "580.65.06", CUDAVersion: "13.0"}))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"name":"gpu-0000-1b-00-0","attributes":{"addressingMode":{"string":"HMM"},` +
		`"architecture":{"string":"Hopper"},"brand":{"string":"Nvidia"},` +
		`"cudaComputeCapability":{"version":"9.0.0"},"cudaDriverVersion":{"version":"13.0.0"},"driverVersion":{"version":"580.65.6"},` +
		`"driverVersionString":{"string":"580.65.06"},"parentUUID":{"string":"GPU-1"},"productName":{"string":"NVIDIA H100 80GB HBM3"},` +
		`"resource.kubernetes.io/numaNode":{"int":1},"resource.kubernetes.io/pciBusID":{"string":"0000:1b:00.0"},` +
		`"resource.kubernetes.io/pcieRoot":{"string":"pci0000:15"},"type":{"string":"gpu"},"uuid":{"string":"GPU-1"}},` +
		`"capacity":{"copyEngines":{"value":"8"},"decoders":{"value":"7"},"encoders":{"value":"0"},"jpegEngines":{"value":"7"},` +
		`"memory":{"value":"81559Mi"},"multiprocessors":{"value":"132"},"ofaEngines":{"value":"1"}}}`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(g, shape.GPU()); diff != "" || shape.Name() != "gpu-0000-1b-00-0" {
		t.Error(shape.Name(), diff)
	}
}

func TestLongAttributeIsTruncatedToValidUTF8(t *testing.T) {
	for _, s := range []string{strings.Repeat("x", 70), strings.Repeat("ü", 70), strings.Repeat("x", 63) + "ü"} {
		got := *text(s).StringValue
		if len(got) > resourceapi.DeviceAttributeMaxValueLength || !strings.HasPrefix(s, got) || strings.ToValidUTF8(got, "?") != got {
			t.Errorf("%q becomes %q", s, got)
		}
	}
}

func TestGPUOrderDoesNotChangeSlices(t *testing.T) {
	gpus := manyGPUs(130)
	before := fmt.Sprint(gpus)
	publish := func() string {
		data, err := json.Marshal(Slices(Offer(dynamic(gpus...)), Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	want := publish()
	if fmt.Sprint(gpus) != before {
		t.Error("Offer changed its argument")
	}
	for range 5 {
		rand.Shuffle(len(gpus), func(i, j int) { gpus[i], gpus[j] = gpus[j], gpus[i] })
		if publish() != want {
			t.Fatal("the order of GPUs changes the slices")
		}
	}
}

func TestNoGPUsPublishNoSlices(t *testing.T) {
	if slices := Slices(Offer(nil), Driver{}, false); len(slices) != 0 {
		t.Error(slices)
	}
}

// manyGPUs returns n H200 GPUs of one node.
func manyGPUs(n int) []GPU {
	gpus := make([]GPU, n)
	for i := range gpus {
		gpus[i] = GPU{
			PCIAddress: PCIAddress(fmt.Sprintf("%04x:%02x:00.0", i/32, i%32)), UUID: fmt.Sprintf("GPU-%d", i), Minor: i,
			ProductName: "NVIDIA H200", Brand: "Nvidia", Architecture: "Hopper", CUDAComputeCapability: "9.0", MemoryBytes: 143771 << 20,
			PCIeRoot: fmt.Sprintf("pci%04x:%02x", i/32, i%32/4*4), NUMANode: ptr.To(i % 2), Engines: &Engines{Multiprocessors: 132},
		}
	}
	return gpus
}

// Two cards of one model must have the same Model, whatever they are used for.
func TestModelIsThatOfTheCard(t *testing.T) {
	gpus := node(t, h100Key, h100Key, l40sKey)
	a, b, other := gpus[0], gpus[1], gpus[2]
	used := *b.MIG
	used.Enabled, used.Pending = true, true
	used.Instances = []Instance{{ID: 1, ProfileID: used.Profiles[0].ID}}
	b.MIG, b.Minor = &used, 7
	if a.Model() == "" || a.Model() != b.Model() || a.Model() == other.Model() || strings.Count(a.Model(), "\n") > 0 {
		t.Errorf("%q, %q and %q", a.Model(), b.Model(), other.Model())
	}
	for name, change := range map[string]func(*GPU){
		"product":    func(g *GPU) { g.ProductName += "X" },
		"memory":     func(g *GPU) { g.MemoryBytes++ },
		"MIG":        func(g *GPU) { g.MIG = nil },
		"profiles":   func(g *GPU) { g.MIG.Profiles = g.MIG.Profiles[1:] },
		"no product": func(g *GPU) { g.ProductName = "" },
	} {
		c := b
		mig := used
		c.MIG = &mig
		change(&c)
		if c.Model() == a.Model() || (c.Model() == "") != (name == "no product") {
			t.Errorf("%s: %q", name, c.Model())
		}
	}
}
