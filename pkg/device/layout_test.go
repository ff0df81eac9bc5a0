package device

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// small returns a GPU with two memory slices. It can be one 2g partition or two 1g partitions, so
// it has three placements.
func small() GPU {
	return GPU{
		PCIAddress: "0000:1b:00.0", UUID: "GPU-1", ProductName: "NVIDIA Small", MemoryBytes: 20 << 30,
		MIG: &MIG{Profiles: []Profile{
			{ID: 0, Name: "2g.20gb", Slices: 2, MaxInstances: 1, MemoryBytes: 20 << 30,
				Engines: Engines{Multiprocessors: 20, CopyEngines: 2}, Size: 2, Starts: []uint32{0}},
			{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 2, MemoryBytes: 10 << 30,
				Engines: Engines{Multiprocessors: 10, CopyEngines: 1}, Size: 1, Starts: []uint32{0, 1}},
		}},
	}
}

// instance returns a 1g MIG instance of the GPU small at memory slice start, with a compute
// instance that fills it.
func instance(id, start uint32) Instance {
	return Instance{
		ID: id, ProfileID: 19, Placement: Placement{start, 1},
		Compute: []ComputeInstance{{Name: "1g.10gb", Multiprocessors: 10, Placement: Placement{0, 1}, UUID: fmt.Sprintf("MIG-%d", id)}},
	}
}

const (
	wholeName = "gpu-0000-1b-00-0"
	vfioName  = wholeName + "-vfio"
	twoName   = wholeName + "-mig-0-0"
	firstName = wholeName + "-mig-19-0"
	lastName  = wholeName + "-mig-19-1"
)

func TestDecideAndOffer(t *testing.T) {
	all := []string{wholeName, firstName, lastName, twoName}
	a, b := instance(7, 0), instance(8, 1)
	type mig func(*MIG)
	on := func(m *MIG) { m.Enabled, m.Pending = true, true }
	partitioned := func(with ...Instance) mig {
		return func(m *MIG) { on(m); m.Instances = with }
	}
	fixed := func(enabled, pending bool, with ...Instance) mig {
		return func(m *MIG) { m.ModeFixed, m.Enabled, m.Pending, m.Instances = true, enabled, pending, with }
	}
	guest := func(enabled bool, with ...Instance) mig {
		return func(m *MIG) { m.ReadOnly, m.Enabled, m.Pending, m.Instances = true, enabled, enabled, with }
	}
	unknown := func(m *MIG) { m.Profiles = nil }
	off := func(*MIG) {}
	for _, c := range []struct {
		name     string
		mig      mig
		owned    []Instance
		policy   PolicyMode
		counters bool
		want     []string
		says     string // part of the wanted reason, empty for none
	}{
		{"in every shape", off, nil, PolicyDynamic, true, all, ""},
		{"in every shape, with MIG mode on and no instance", on, nil, PolicyDynamic, true, all, ""},
		{"in every shape, while claims hold some", partitioned(a), []Instance{a}, PolicyDynamic, true, all, ""},
		{"in every shape, policy adopt", off, nil, PolicyAdopt, true, all, ""},
		{"admin instance", partitioned(a), nil, PolicyDynamic, true, []string{firstName}, "no claim created"},
		{"admin instance and held instance", partitioned(a, b), []Instance{a}, PolicyDynamic, true,
			[]string{firstName, lastName}, "no claim created"},
		{"admin instance, policy adopt", partitioned(a), nil, PolicyAdopt, true, []string{firstName}, "idle"},
		{"admin instance with the reused ID of one of ours", partitioned(a),
			[]Instance{{ID: 7, ProfileID: 19, Placement: Placement{1, 1}}}, PolicyDynamic, true, []string{firstName}, "no claim created"},

		{"static: whole", off, nil, PolicyStatic, true, []string{wholeName}, ""},
		{"static: whole, without a named policy", off, nil, "", true, []string{wholeName}, ""},
		{"static: empty", on, nil, PolicyStatic, true, nil,
			"nothing is offered: MIG mode is on and there is no MIG instance; create one with nvidia-smi mig"},
		{"static: existing instances", partitioned(a, b), nil, PolicyStatic, true, []string{firstName, lastName}, ""},
		{"static: existing instances and held instance", partitioned(a, b), []Instance{b}, PolicyStatic, true, []string{firstName, lastName}, ""},
		{"static: held instance", partitioned(a), []Instance{a}, PolicyStatic, true, []string{firstName}, "while claims hold its partitions"},

		{"off: whole", off, nil, PolicyOff, true, []string{wholeName}, ""},
		{"off: whole, with MIG mode on", on, nil, PolicyOff, true, []string{wholeName}, ""},
		{"off: nothing with an admin instance", partitioned(a), nil, PolicyOff, true, nil, "nvidia-smi mig"},
		{"off: only held instance with an admin instance", partitioned(a, b), []Instance{b}, PolicyOff, true,
			[]string{lastName}, "nvidia-smi mig"},
		{"off: held instance only", partitioned(a), []Instance{a}, PolicyOff, true, []string{firstName}, "waiting for claims"},

		{"Ampere, off", fixed(false, false), nil, PolicyDynamic, true, []string{wholeName}, "reset"},
		{"Ampere, on", fixed(true, true), nil, PolicyDynamic, true, all[1:], "reset"},
		{"Ampere, on, with held instance", fixed(true, true, a), []Instance{a}, PolicyDynamic, true, all[1:], "reset"},
		{"Ampere, on, with admin instance", fixed(true, true, a), nil, PolicyDynamic, true, []string{firstName}, "no claim created"},
		{"Ampere, off and on after a reset", fixed(false, true), nil, PolicyDynamic, true, []string{wholeName}, "pending"},
		{"Ampere, on and off after a reset", fixed(true, false), nil, PolicyAdopt, true, all[1:], "pending"},
		{"Ampere, on, by policy whole only", fixed(true, true), nil, PolicyOff, true, nil, "reset"},
		{"Ampere, off, by policy whole only", fixed(false, false), nil, PolicyOff, true, []string{wholeName}, ""},
		{"Ampere, off, static", fixed(false, false), nil, PolicyStatic, true, []string{wholeName}, ""},
		{"Ampere, on, static", fixed(true, true), nil, PolicyStatic, true, nil, "nothing is offered"},
		{"Ampere, on and off after a reset, static", fixed(true, false), nil, PolicyStatic, true, nil, "-mig 0, which is pending"},
		{"Ampere, on, without counters", fixed(true, true), nil, PolicyDynamic, false, nil, "DRAPartitionableDevices"},
		{"Ampere, on, without counters, held instance", fixed(true, true, a), []Instance{a}, PolicyDynamic, false,
			[]string{firstName}, "DRAPartitionableDevices"},

		{"guest of a virtual GPU, whole", guest(false), nil, PolicyDynamic, true, []string{wholeName}, "guest"},
		{"guest of a virtual GPU, partitioned", guest(true, a), nil, PolicyDynamic, true, []string{firstName}, "guest"},
		{"guest of a virtual GPU, without an instance", guest(true), nil, PolicyAdopt, true, nil, "guest"},
		{"guest of a virtual GPU, whole, static", guest(false), nil, PolicyStatic, true, []string{wholeName}, ""},
		{"guest of a virtual GPU, partitioned, static", guest(true, a), nil, PolicyStatic, true, []string{firstName}, ""},
		{"guest of a virtual GPU, without an instance, static", guest(true), nil, PolicyStatic, true, nil, "nothing is offered"},
		{"guest of a virtual GPU, whole, by policy whole only", guest(false), nil, PolicyOff, true, []string{wholeName}, ""},
		{"guest of a virtual GPU, partitioned, by policy whole only", guest(true, a), nil, PolicyOff, true, []string{firstName}, "guest"},

		{"without counters: whole", off, nil, PolicyDynamic, false, []string{wholeName}, "DRAPartitionableDevices"},
		{"without counters: whole, with MIG mode on and no instance", on, nil, PolicyDynamic, false, []string{wholeName},
			"DRAPartitionableDevices"},
		{"without counters: admin instances", partitioned(a, b), nil, PolicyDynamic, false, []string{firstName, lastName}, "no claim created"},
		{"without counters: held instance", partitioned(b), []Instance{b}, PolicyDynamic, false, []string{lastName}, "DRAPartitionableDevices"},
		{"without counters, static", off, nil, PolicyStatic, false, []string{wholeName}, ""},

		{"profiles that could not be read", unknown, nil, PolicyDynamic, true, []string{wholeName}, "profiles are not known"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := small()
			c.mig(g.MIG)
			layout, reason := Decide(g, c.owned, Policy{Mode: c.policy}, c.counters)
			shapes := Offer([]Offering{{GPU: g, Layout: layout}})
			var names []string
			for _, s := range shapes {
				names = append(names, s.Name())
			}
			slices.Sort(names)
			want := slices.Sorted(slices.Values(c.want))
			if diff := cmp.Diff(want, names); diff != "" {
				t.Error(diff)
			}
			if c.says == "" && reason != "" || !strings.Contains(reason, c.says) || c.says != "" && reason == "" {
				t.Errorf("reason: %q, want %q", reason, c.says)
			}
			for _, name := range names {
				if !slices.Contains(g.DeviceNames(), name) {
					t.Errorf("%s is not among the GPU's names", name)
				}
			}
			counted := false
			for _, s := range Slices(shapes, Driver{}, false) {
				counted = counted || len(s.SharedCounters) > 0
			}
			if overlap := layout.Placements; counted != overlap {
				t.Errorf("counters are published: %v, shapes overlap: %v", counted, overlap)
			}
		})
	}
}

// The list of profiles in a policy must limit which placements are offered. MIG instances that
// exist must stay offered.
func TestPolicyProfileListLimitsPlacements(t *testing.T) {
	one, two := instance(7, 0), Instance{
		ID: 1, ProfileID: 0, Placement: Placement{0, 2}, Compute: []ComputeInstance{{Name: "2g.20gb", Placement: Placement{0, 2}, UUID: "MIG-2"}},
	}
	for _, c := range []struct {
		name             string
		instances, owned []Instance
		mode             PolicyMode
		profiles         []string
		held             map[string]bool
		want             []string
		says             string
	}{
		{"one profile", nil, nil, PolicyDynamic, []string{"2g.20gb"}, nil, []string{wholeName, twoName}, ""},
		{"the other", nil, nil, PolicyAdopt, []string{"1g.10gb"}, nil, []string{wholeName, firstName, lastName}, ""},
		{"both", nil, nil, PolicyDynamic, []string{"2g.20gb", "1g.10gb"}, nil, []string{wholeName, firstName, lastName, twoName}, ""},
		{"instance of a listed profile", []Instance{one}, []Instance{one}, PolicyDynamic, []string{"1g.10gb"}, nil,
			[]string{wholeName, firstName, lastName}, ""},
		{"instance of another profile", []Instance{two}, []Instance{two}, PolicyDynamic, []string{"1g.10gb"}, nil,
			[]string{wholeName, twoName, firstName, lastName}, ""},
		{"held placement without instance", nil, nil, PolicyDynamic, []string{"2g.20gb"}, map[string]bool{lastName: true},
			[]string{wholeName, lastName, twoName}, ""},
		{"admin instance", []Instance{one}, nil, PolicyDynamic, []string{"2g.20gb"}, nil, []string{firstName}, "no claim created"},
		{"unknown profile", nil, nil, PolicyDynamic, []string{"1g.10gb", "3g.40gb"}, nil, []string{wholeName},
			"its profiles are 2g.20gb, 1g.10gb"},
		{
			"unknown profile and admin instance", []Instance{one}, nil, PolicyAdopt, []string{"3g.40gb"}, nil, []string{firstName},
			"the GPU has no profile 3g.40gb",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := small()
			g.MIG.Instances, g.MIG.Enabled, g.MIG.Pending = c.instances, len(c.instances) > 0, len(c.instances) > 0
			layout, reason := Decide(g, c.owned, Policy{Mode: c.mode, Profiles: c.profiles}, true)
			var names []string
			for _, s := range Offer([]Offering{{GPU: g, Layout: layout, Held: c.held}}) {
				names = append(names, s.Name())
			}
			if diff := cmp.Diff(c.want, names); diff != "" {
				t.Error(diff)
			}
			if !strings.Contains(reason, c.says) || (reason == "") != (c.says == "") {
				t.Errorf("the reason is %q, want %q", reason, c.says)
			}
		})
	}
}

func TestGPUWithoutMIGIsWholeUnderEveryPolicy(t *testing.T) {
	for _, p := range []PolicyMode{PolicyDynamic, PolicyStatic, PolicyOff, PolicyAdopt} {
		for _, counters := range []bool{true, false} {
			layout, reason := Decide(GPU{}, nil, Policy{Mode: p}, counters)
			if diff := cmp.Diff(Layout{Whole: true}, layout); diff != "" || reason != "" {
				t.Error(p, reason, diff)
			}
		}
	}
}

// If no devices overlap, a MIG-capable GPU must be published like a GPU without MIG, because the
// cluster may drop fields that it does not know.
func TestWholeMIGCapableGPUIsPublishedLikeOneWithoutMIG(t *testing.T) {
	publish := func(o Offering) string {
		data, err := json.Marshal(Slices(Offer([]Offering{o}), Driver{Version: "580.65.06"}, true))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	plain := small()
	plain.MIG = nil
	if diff := cmp.Diff(publish(Offering{GPU: plain, Layout: Layout{Whole: true}}),
		publish(Offering{GPU: small(), Layout: Layout{Whole: true}})); diff != "" {
		t.Error(diff)
	}
}

// The MIG instances of an admin must be offered as they are, with one device for each compute
// instance. A MIG instance without a compute instance must not be offered.
func TestInstancesOfAdminAreOfferedAsTheyAre(t *testing.T) {
	g := small()
	g.MIG.Instances = []Instance{
		{ID: 1, ProfileID: 0, Placement: Placement{0, 2}, Compute: []ComputeInstance{
			{ID: 0, Name: "1c.2g.20gb", Multiprocessors: 10, UUID: "MIG-a"}, {ID: 3, Name: "1c.2g.20gb", Multiprocessors: 10, UUID: "MIG-b"},
		}},
		{ID: 7, ProfileID: 19, Placement: Placement{0, 1}, Compute: []ComputeInstance{{ID: 0, Name: "1g.10gb",
			Multiprocessors: 10, UUID: "MIG-c"}}},
		{ID: 8, ProfileID: 19, Placement: Placement{1, 1}},
		// This MIG instance has a profile that the driver does not list, and a compute instance that is
		// smaller than the GPU instance.
		{ID: 9, ProfileID: 77, Placement: Placement{4, 2}, Compute: []ComputeInstance{{ID: 1, Name: "1c.2g.24gb",
			Multiprocessors: 4, UUID: "MIG-d"}}},
	}
	type device struct{ Profile, UUID, Memory, Multiprocessors string }
	got := map[string]device{}
	for _, s := range Offer([]Offering{{GPU: g, Layout: Layout{Instances: g.MIG.Instances}}}) {
		d := s.Device(Driver{})
		read := func(name resourceapi.QualifiedName) string {
			c, ok := d.Capacity[name]
			if !ok {
				return ""
			}
			return c.Value.String()
		}
		got[s.Name()] = device{*d.Attributes["profile"].StringValue, *d.Attributes["uuid"].StringValue, read("memory"), read("multiprocessors")}
		n, ok := ParseName(s.Name())
		if !ok || n.Partition == nil {
			t.Fatalf("%s is not the name of a partition", s.Name())
		}
		found := 0
		for _, i := range g.MIG.Instances {
			if c, ok := i.Part(*n.Partition); ok && c.UUID == got[s.Name()].UUID {
				found++
			}
		}
		if found != 1 {
			t.Errorf("the name %s finds %d instances", s.Name(), found)
		}
	}
	want := map[string]device{
		wholeName + "-mig-0-0-ci-0":  {"1c.2g.20gb", "MIG-a", "20Gi", "10"},
		wholeName + "-mig-0-0-ci-3":  {"1c.2g.20gb", "MIG-b", "20Gi", "10"},
		firstName:                    {"1g.10gb", "MIG-c", "10Gi", "10"},
		wholeName + "-mig-77-4-ci-1": {"1c.2g.24gb", "MIG-d", "0", "4"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, ok := g.MIG.Instances[0].Part(PartitionName{ProfileID: 0}); ok {
		t.Error("one of two compute instances counts as the whole GPU instance")
	}
	if _, ok := g.MIG.Instances[1].Part(PartitionName{ProfileID: 19, Compute: ptr.To(uint32(0))}); ok {
		t.Error("a compute instance that fills its GPU instance counts as a part of it")
	}
}

func TestPublishedPlacement(t *testing.T) {
	g := small()
	g.Brand, g.Architecture, g.CUDAComputeCapability, g.PCIeRoot, g.NUMANode = "Nvidia", "Hopper", "9.0", "pci0000:15", ptr.To(1)
	var data []byte
	for _, s := range Offer(dynamic(g)) {
		if s.Name() == lastName {
			var err error
			if data, err = json.Marshal(s.Device(Driver{Version: "580.65.06", CUDAVersion: "13.0"})); err != nil {
				t.Fatal(err)
			}
		}
	}
	want := `{"name":"gpu-0000-1b-00-0-mig-19-1","attributes":{"addressingMode":{"string":"None"},` +
		`"architecture":{"string":"Hopper"},"brand":{"string":"Nvidia"},` +
		`"cudaComputeCapability":{"version":"9.0.0"},"cudaDriverVersion":{"version":"13.0.0"},"driverVersion":{"version":"580.65.6"},` +
		`"driverVersionString":{"string":"580.65.06"},"parentUUID":{"string":"GPU-1"},"placementSize":{"int":1},"placementStart":{"int":1},` +
		`"productName":{"string":"NVIDIA Small"},"profile":{"string":"1g.10gb"},"profileID":{"int":19},` +
		`"resource.kubernetes.io/numaNode":{"int":1},"resource.kubernetes.io/pciBusID":{"string":"0000:1b:00.0"},` +
		`"resource.kubernetes.io/pcieRoot":{"string":"pci0000:15"},"type":{"string":"mig"},"uuid":{"string":"not-cut"}},` +
		`"capacity":{"copyEngines":{"value":"1"},"decoders":{"value":"0"},"encoders":{"value":"0"},"jpegEngines":{"value":"0"},` +
		`"memory":{"value":"10Gi"},"multiprocessors":{"value":"10"},"ofaEngines":{"value":"0"}},` +
		`"consumesCounters":[{"counterSet":"gpu-0000-1b-00-0","counters":{"memory":{"value":"10Gi"},"memory-slice-1":{"value":"1"}}}]}`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Error(diff)
	}
}
