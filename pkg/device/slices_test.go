package device

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

func TestSliceCounts(t *testing.T) {
	models := readModels(t)
	for _, c := range []struct {
		model                       string
		gpus                        int
		counters, devices, released int // numbers of slices with counters, slices with devices, and devices
	}{
		{"h100-sxm5-80gb", 1, 1, 1, 26},
		{"h100-sxm5-80gb", 8, 1, 4, 208},
		{"h100-sxm5-80gb", 9, 2, 4, 234},
		{"h100-sxm5-80gb", 16, 2, 7, 416},
		{"a100-sxm4-80gb", 8, 1, 4, 200},
		{"rtx-pro-6000-blackwell", 8, 1, 4, 248},
	} {
		t.Run(fmt.Sprintf("%d %s", c.gpus, c.model), func(t *testing.T) {
			m := newMachine(t, migCapable(models[c.model], c.gpus), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
			checkAPILimits(t, m)
			counters, devices, released := 0, 0, 0
			for _, s := range m.Slices {
				if len(s.Spec.SharedCounters) > 0 {
					counters++
				} else {
					devices++
				}
				released += len(s.Spec.Devices)
			}
			if counters != c.counters || devices != c.devices || released != c.released {
				t.Errorf("%d slices of counters and %d of devices, with %d devices, want %d, %d, %d", counters, devices, released,
					c.counters, c.devices, c.released)
			}
		})
	}
}

func TestExistingInstancesOfEveryModelAreOffered(t *testing.T) {
	forEachMIGModel(t, func(t *testing.T, known *model.GPU) {
		g := migCapable(known, 1)[0]
		g.MIG.Enabled = true
		for i, p := range g.MIG.Profiles {
			for _, start := range p.Starts { // more than fit together, but no answer of the hardware may break the API's limits
				g.MIG.Instances = append(g.MIG.Instances, Instance{
					ID: uint32(i)*16 + start, ProfileID: p.ID, Placement: Placement{start,
						p.Size}, Compute: []ComputeInstance{{Name: p.Name, UUID: "MIG-1"}},
				})
			}
		}
		layout, _ := Decide(g, nil, Policy{Mode: PolicyDynamic}, true)
		m := offered(t, []Offering{{GPU: g, Layout: layout}}, Driver{Version: "580.65.06"})
		checkAPILimits(t, m)
		for _, s := range m.Slices {
			if len(s.Spec.SharedCounters) > 0 {
				t.Error("devices without overlap have counters")
			}
		}
	})
}

// The order in which devices are published must not change, because the scheduler takes the first
// device that fits. The comments of the functions Offer and placementsOf explain the order.
func TestPublishingOrder(t *testing.T) {
	models := readModels(t)
	gpus := migCapable(models["h100-sxm5-80gb"], 2)
	slices.Reverse(gpus)
	var names []string
	for _, s := range Offer(dynamic(gpus...)) {
		name := s.Name()
		if p, ok := s.(Partition); ok {
			name = fmt.Sprintf("%s %s@%d", s.GPU().WholeName(), p.profile, p.at.Start)
		}
		names = append(names, name)
	}
	card := func(gpu string) (all []string) {
		for _, p := range []string{
			"1g.10gb@6", "1g.10gb@4", "1g.10gb@5", "1g.10gb@0", "1g.10gb@1", "1g.10gb@2", "1g.10gb@3",
			"1g.10gb+me@6", "1g.10gb+me@4", "1g.10gb+me@5", "1g.10gb+me@0", "1g.10gb+me@1", "1g.10gb+me@2", "1g.10gb+me@3",
			"1g.20gb@6", "1g.20gb@4", "1g.20gb@0", "1g.20gb@2", "2g.20gb@4", "2g.20gb@0", "2g.20gb@2",
			"3g.40gb@4", "3g.40gb@0", "4g.40gb@0", "7g.80gb@0",
		} {
			all = append(all, gpu+" "+p)
		}
		return all
	}
	want := slices.Concat([]string{"gpu-0000-00-00-0", "gpu-0000-01-00-0"}, card("gpu-0000-01-00-0"), card("gpu-0000-00-00-0"))
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}

	var profiles []string
	for _, s := range Offer(dynamic(migCapable(models["rtx-pro-6000-blackwell"], 1)...))[1:] {
		profiles = append(profiles, s.(Partition).profile)
	}
	want = []string{
		"1g.24gb-me", "1g.24gb", "1g.24gb+gfx", "1g.24gb+me", "1g.24gb+me.all",
		"2g.48gb-me", "2g.48gb", "2g.48gb+gfx", "2g.48gb+me.all", "4g.96gb", "4g.96gb+gfx",
	}
	if diff := cmp.Diff(want, slices.Compact(profiles)); diff != "" {
		t.Error(diff)
	}
}

func TestGPUOrderDoesNotChangePartitionSlices(t *testing.T) {
	models := readModels(t)
	gpus := append(migCapable(models["h100-sxm5-80gb"], 9), manyGPUs(40)[32:]...)
	publish := func() string {
		data, err := json.Marshal(Slices(Offer(dynamic(gpus...)), Driver{Version: "580.65.06", CUDAVersion: "13.0"}, true))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	want := publish()
	for range 5 {
		rand.Shuffle(len(gpus), func(i, j int) { gpus[i], gpus[j] = gpus[j], gpus[i] })
		for i := range gpus {
			if m := gpus[i].MIG; m != nil {
				rand.Shuffle(len(m.Profiles), func(i, j int) { m.Profiles[i], m.Profiles[j] = m.Profiles[j], m.Profiles[i] })
			}
		}
		if publish() != want {
			t.Fatal("the order of GPUs or profiles changes the slices")
		}
	}
}

// Creating and removing MIG instances for claims must not change the slices, because hundreds of
// claims may come and go in a minute.
func TestInstancesOfClaimsDoNotChangeSlices(t *testing.T) {
	publish := func(instances ...Instance) string {
		g := small()
		g.MIG.Enabled, g.MIG.Instances = len(instances) > 0, instances
		layout, _ := Decide(g, instances, Policy{Mode: PolicyDynamic}, true)
		data, err := json.Marshal(Slices(Offer([]Offering{{GPU: g, Layout: layout}}), Driver{Version: "580.65.06"}, false))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if diff := cmp.Diff(publish(), publish(instance(7, 0), instance(8, 1))); diff != "" {
		t.Error(diff)
	}
}

// On all GPUs of a machine, devices of one partition type must cost the same counters, except for
// the placement.
func TestPartitionTypes(t *testing.T) {
	models := readModels(t)
	var gpus []GPU
	for i, key := range []string{"h100-sxm5-80gb", "h100-sxm5-80gb", "a100-sxm4-80gb", "l40s-48gb"} {
		g := fromModel(models[key])
		g.PCIAddress = PCIAddress(fmt.Sprintf("0000:0%d:00.0", i))
		if g.MIG != nil {
			g.MIG.Enabled, g.MIG.Pending = true, true
		}
		gpus = append(gpus, g)
	}
	costs := map[string]sets.Set[string]{}
	for _, s := range Slices(Offer(dynamic(gpus...)), Driver{}, true) {
		if named := s.PartitionTypeAttribute != nil; named != (len(s.Devices) > 0) || named &&
			*s.PartitionTypeAttribute != "gpu.nvidia.com/partitionType" {
			t.Errorf("a slice of %d devices names %v", len(s.Devices), ptr.Deref(s.PartitionTypeAttribute, "nothing"))
		}
		for _, d := range s.Devices {
			kind, typed := d.Attributes["partitionType"]
			if typed != (len(d.ConsumesCounters) > 0) {
				t.Errorf("%s has partition type %v", d.Name, typed)
			}
			if !typed {
				continue
			}
			memory, others := 0, []string{}
			for name, n := range d.ConsumesCounters[0].Counters {
				if strings.HasPrefix(name, "memory-slice-") {
					memory += int(n.Value.Value())
				} else {
					others = append(others, name+"="+n.Value.String())
				}
			}
			slices.Sort(others)
			if costs[*kind.StringValue] == nil {
				costs[*kind.StringValue] = sets.New[string]()
			}
			costs[*kind.StringValue].Insert(fmt.Sprint(memory, others))
		}
	}
	if len(costs) != 8+7+1 {
		t.Errorf("there are %d partition types: %v", len(costs), costs)
	}
	for kind, different := range costs {
		if different.Len() != 1 || len(kind) > resourceapi.DeviceAttributeMaxValueLength {
			t.Errorf("devices of type %q cost %v", kind, different.UnsortedList())
		}
	}
}

// Admin access to GPUs without counters must see all GPUs, even those of claims. With counters,
// admin access sees only idle GPUs, because it requests a device's counters a second time
// (https://github.com/kubernetes/kubernetes/issues/140729).
func TestAdminAccess(t *testing.T) {
	gpus := migCapable(readModels(t)["h100-sxm5-80gb"], 2)
	all := resourceapi.DeviceRequest{Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: driverName, AllocationMode: resourceapi.DeviceAllocationModeAll, AdminAccess: ptr.To(true),
	}}
	first := count(1)
	first.Exactly.AdminAccess = ptr.To(true)
	for _, c := range []struct {
		policy PolicyMode
		// seesIdle and seesBusy are how many GPUs an admin request for all GPUs gets while all are idle
		// and while all are in use. one is how many GPUs an admin request for one GPU gets while one of
		// two is in use.
		seesIdle, seesBusy, one int
	}{{PolicyStatic, 2, 2, 1}, {PolicyOff, 2, 2, 1}, {PolicyDynamic, 2, 0, 1}} {
		m := offered(t, offerUnder(Policy{Mode: c.policy}, gpus...), Driver{Version: "580.65.06", CUDAVersion: "13.0"})
		taken := scheduler.NewTaken()
		if got := m.allocate(taken, requests(all)); len(got) != c.seesIdle || taken.Len() != 0 {
			t.Errorf("%s: admin access to idle GPUs sees %v and consumes %d", c.policy, got, taken.Len())
		}
		if got := m.allocate(taken, requests(count(1))); len(got) != 1 {
			t.Fatal(got)
		}
		if got := m.allocate(taken, requests(first)); len(got) != c.one {
			t.Errorf("%s: admin access with one GPU in use sees %v", c.policy, got)
		}
		m.allocate(taken, requests(count(1)))
		if got := m.allocate(taken, requests(all)); len(got) != c.seesBusy {
			t.Errorf("%s: admin access to GPUs in use sees %v", c.policy, got)
		}
		if got := m.allocate(taken, requests(count(1))); got != nil {
			t.Errorf("%s: a GPU in use was allocated again: %v", c.policy, got)
		}
		if got := m.allocate(taken, requests(partitions(1))); got != nil {
			t.Errorf("%s: a partition of a GPU in use was allocated: %v", c.policy, got)
		}
	}
}

// For a new GPU model, a model file must be enough, without new code. The model in this test has
// six memory slices, an engine that few partitions can have, and profiles of which the card allows
// fewer instances than would fit.
func TestUnknownModelNeedsNoCode(t *testing.T) {
	const file = `
productName: NVIDIA Unheard-of
brand: {value: Nvidia, nvmlValue: 14}
architecture: {value: Hopper, nvmlValue: 9}
cudaComputeCapability: "12.7"
pciDeviceId: "0x233010DE"
pciSubsystemId: "0x16C110DE"
memoryTotalMiB: 98304
multiprocessors: 96
mig:
  supported: true
  maxInstances: 6
  memorySlices: 6
  gpuInstanceProfiles:
  - {name: MIG 1g.16gb, id: 40, nvmlProfile: "1_SLICE", slices: 1, instancesMax: 4, memoryMiB: 16384,
     sm: 16, dec: 0, ce: 1, ofa: 0, placements: {starts: [0, 1, 2, 3, 4, 5], size: 1}}
  - {name: MIG 1g.16gb+me, id: 41, nvmlProfile: "1_SLICE_REV1", slices: 1, instancesMax: 2, memoryMiB: 16384,
     sm: 16, dec: 1, ce: 1, ofa: 0, placements: {starts: [0, 2, 4], size: 1}}
  - {name: MIG 2g.32gb, id: 30, nvmlProfile: "2_SLICE", slices: 2, instancesMax: 3, memoryMiB: 32768,
     sm: 32, dec: 1, ce: 2, ofa: 1, placements: {starts: [0, 2, 4], size: 2}}
  - {name: MIG 3g.48gb, id: 20, nvmlProfile: "3_SLICE", slices: 3, instancesMax: 1, memoryMiB: 49152,
     sm: 48, dec: 2, ce: 3, ofa: 1, placements: {starts: [0, 3], size: 3}}
  - {name: MIG 6g.96gb, id: 0, nvmlProfile: "6_SLICE", slices: 6, instancesMax: 1, memoryMiB: 98304,
     sm: 96, dec: 4, ce: 6, ofa: 3, placements: {starts: [0], size: 6}}
`
	path := filepath.Join(t.TempDir(), "unheard-of.yaml")
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	known, err := model.ReadGPU(path)
	if err != nil {
		t.Fatal(err)
	}
	h := newHardware(known)
	checkCountersAgree(t, h)
	m := newMachine(t, migCapable(known, 3), Driver{Version: "999.1", CUDAVersion: "20.0"})
	checkAPILimits(t, m)
	for _, name := range []string{"profile-40", "profile-41", "profile-20"} {
		if _, ok := m.Slices[0].Spec.SharedCounters[0].Counters[name]; !ok {
			t.Errorf("there is no counter %s among %v", name, m.Slices[0].Spec.SharedCounters[0].Counters)
		}
	}
	for _, name := range []string{"profile-30", "profile-0", "copy-engines"} {
		if _, ok := m.Slices[0].Spec.SharedCounters[0].Counters[name]; ok {
			t.Errorf("counter %s restricts nothing", name)
		}
	}
}

// Nonsensical numbers from the hardware must not make invalid slices, because the API server would
// then reject all GPUs of the node.
func TestNonsensicalMIGDataOffersWholeGPUOnly(t *testing.T) {
	for name, change := range map[string]func(*MIG){
		"more memory slices than counters": func(m *MIG) { m.Profiles[1].Starts = append(m.Profiles[1].Starts, 32) },
		"placement at the maximum value":   func(m *MIG) { m.Profiles[1].Starts = []uint32{1<<32 - 1} },
		"profile of the maximum size":      func(m *MIG) { m.Profiles[1].Size = 1<<32 - 1 },
		"thirty-two memory slices and an engine": func(m *MIG) {
			m.Profiles[1] = Profile{ID: 19, Name: "1g", Size: 1, Starts: []uint32{0, 31}, MaxInstances: 1}
		},
	} {
		g := small()
		g.Brand, g.Architecture = "Nvidia", "Hopper"
		change(g.MIG)
		m := newMachine(t, []GPU{g}, Driver{Version: "580.65.06"})
		checkAPILimits(t, m)
		layout, reason := Decide(g, nil, Policy{Mode: PolicyDynamic}, true)
		if !layout.Whole || layout.Placements || !strings.Contains(reason, "counters") || len(m.Slices) != 1 {
			t.Errorf("%s: %+v, %q", name, layout, reason)
		}
	}
}
