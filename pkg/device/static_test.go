package device

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// With the default policy, each GPU must be one device without counters, because older schedulers
// and other components do not understand counters.
func TestDefaultPolicyPublishesNoCounters(t *testing.T) {
	policies, err := MIGSettings{}.Policies(nil)
	if err != nil {
		t.Fatal(err)
	}
	for key, known := range readModels(t) {
		t.Run(key, func(t *testing.T) {
			var offerings []Offering
			for _, g := range gpusOf(known, 8) {
				layout, reason := Decide(g, nil, policies.For(g), true)
				if reason != "" {
					t.Errorf("the GPU is not offered as the policy says: %s", reason)
				}
				offerings = append(offerings, Offering{GPU: g, Layout: layout})
			}
			devices := 0
			for _, s := range Slices(Offer(offerings), Driver{Version: "580.65.06"}, true) {
				devices += len(s.Devices)
				if len(s.SharedCounters) > 0 {
					t.Errorf("counter sets are published: %v", s.SharedCounters)
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

// gpusOf returns n GPUs of a model, with MIG mode off.
func gpusOf(known *model.GPU, n int) []GPU {
	gpus := make([]GPU, n)
	for i, g := range manyGPUs(n) {
		gpus[i] = fromModel(known)
		gpus[i].PCIAddress, gpus[i].UUID = g.PCIAddress, g.UUID
	}
	return gpus
}

// Before a claim partitions a GPU, the scheduler must use an idle MIG instance of an admin on any
// other GPU.
func TestIdleInstancesAreAllocatedBeforePlacements(t *testing.T) {
	for _, index := range []int{0, 7} {
		gpus := migCapable(readModels(t)[h100Key], 8)
		g := &gpus[index]
		g.MIG.Enabled, g.MIG.Pending = true, true
		g.MIG.Instances = []Instance{{
			ID: 9, ProfileID: 19, Placement: Placement{2, 1}, Compute: []ComputeInstance{{Name: "1g.10gb",
				Placement: Placement{0, 1}, UUID: "MIG-1"}},
		}}
		m := newMachine(t, gpus, Driver{Version: "580.65.06"})
		checkAPILimits(t, m)
		taken := scheduler.NewTaken()
		if got := m.allocate(taken, requests(partitions(1, profile("1g.10gb")))); len(got) != 1 || got[0] != g.WholeName()+"-mig-19-2" {
			t.Errorf("with an admin instance on GPU %d, a claim gets %v", index, got)
		}
		got := m.allocate(taken, requests(partitions(1, profile("1g.10gb"))))
		if n, _ := ParseName(append(got, "")[0]); n.GPU != gpus[7-min(index, 1)].WholeName() || n.Partition == nil {
			t.Errorf("with an admin instance on GPU %d, the next claim gets %v", index, got)
		}
	}
}
