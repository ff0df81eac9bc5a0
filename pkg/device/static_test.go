package device

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// Without configuration nothing overlaps: one device a GPU, and no counters, which older schedulers
// and other components do not understand.
func TestADefaultInstallationPublishesNoCounters(t *testing.T) {
	policies, err := ParsePolicies("")
	if err != nil {
		t.Fatal(err)
	}
	for key, known := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			var offerings []Offering
			for _, g := range several(known, 8) {
				layout, reason := Decide(g, nil, policies.For(g), true)
				if reason != "" {
					t.Errorf("it is limited: %s", reason)
				}
				offerings = append(offerings, Offering{GPU: g, Layout: layout})
			}
			devices := 0
			for _, s := range Slices(Offer(offerings), Driver{Version: "580.65.06"}, PartitionTypes(driverName)) {
				devices += len(s.Devices)
				if len(s.SharedCounters) > 0 {
					t.Errorf("there are counter sets %v", s.SharedCounters)
				}
				for _, d := range s.Devices {
					if len(d.ConsumesCounters) > 0 || *d.Attributes["type"].StringValue != "gpu" {
						t.Errorf("%s consumes %v", d.Name, d.ConsumesCounters)
					}
				}
			}
			if devices != len(offerings) {
				t.Errorf("%d devices of %d GPUs", devices, len(offerings))
			}
		})
	}
}

// several are cards of a model with MIG mode off.
func several(known *model.GPU, n int) []GPU {
	gpus := make([]GPU, n)
	for i, g := range manyGPUs(n) {
		gpus[i] = fromModel(known)
		gpus[i].PCIAddress, gpus[i].UUID = g.PCIAddress, g.UUID
	}
	return gpus
}

// An idle instance that an admin made serves a claim before another GPU is cut, wherever that GPU
// is.
func TestWhatAnAdminCutIsUsedBeforeAnotherGPUIsCut(t *testing.T) {
	for _, cut := range []int{0, 7} {
		gpus := cuttable(readModels(t)[h100Key], 8)
		g := &gpus[cut]
		g.MIG.Enabled, g.MIG.Pending = true, true
		g.MIG.Instances = []Instance{{
			ID: 9, ProfileID: 19, Placement: Placement{2, 1}, Compute: []ComputeInstance{{Name: "1g.10gb", Placement: Placement{0, 1}, UUID: "MIG-1"}},
		}}
		m := newMachine(t, gpus, Driver{Version: "580.65.06"})
		keepsLimits(t, m)
		taken := scheduler.NewTaken()
		if got := m.allocate(taken, requests(partitions(1, profile("1g.10gb")))); len(got) != 1 || got[0] != g.WholeName()+"-mig-19-2" {
			t.Errorf("GPU %d is cut by an admin, and a claim gets %v", cut, got)
		}
		got := m.allocate(taken, requests(partitions(1, profile("1g.10gb"))))
		if n, _ := ParseName(append(got, "")[0]); n.GPU != gpus[7-min(cut, 1)].WholeName() || n.Partition == nil {
			t.Errorf("GPU %d is cut by an admin, and the next claim gets %v", cut, got)
		}
	}
}
