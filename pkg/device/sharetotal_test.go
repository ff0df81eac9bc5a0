package device

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Totals must return the capacities that the ResourceSlices publish for a share device, so that the
// node and the scheduler limit claims by the same amounts.
func TestTotalsEqualPublishedCapacities(t *testing.T) {
	for _, rules := range []string{
		"[{kind: fractions}, {profile: '*', kind: fractions}]", "[{kind: shares, count: 4}, {profile: '*', kind: shares, count: 3}]",
		"[{index: 0, kind: shares, count: 2}, {index: 1, kind: shares, count: 5}, {profile: 1g.10gb, kind: shares, count: 7}, " +
			"{profile: '3g.*', kind: fractions}]",
	} {
		gpus := node(t, h100Key, l40sKey)
		index := map[string]int{}
		for _, g := range gpus {
			for _, other := range gpus {
				if other.PCIAddress < g.PCIAddress {
					index[g.WholeName()]++
				}
			}
		}
		offerings := sharing(t, rules, gpus...)
		seen := 0
		for _, s := range Offer(offerings) {
			shared, is := s.(Shared)
			if !is {
				continue
			}
			seen++
			name, _ := ParseName(s.Name())
			got := offerings[0].Shares.Totals(s.GPU(), index[s.GPU().WholeName()], name)
			for capacity, published := range shared.Device(Driver{}).Capacity {
				total, known := got[string(capacity)]
				if !known || total.Cmp(published.Value) != 0 {
					t.Errorf("%s: the total of %s is %s of %s, but %s is published", rules, s.Name(), total.String(), capacity, published.Value.String())
				}
			}
		}
		if seen < 2 {
			t.Errorf("%s: %d shares are offered", rules, seen)
		}
	}
}

func TestUnknownCapacitiesHaveNoTotal(t *testing.T) {
	gpu := node(t, h100Key)[0]
	rules := sharing(t, "[{kind: shares, count: 2}]", gpu)[0].Shares
	for name, c := range map[string]struct {
		gpu    GPU
		device string
		rules  ShareRules
		want   map[string]string
	}{
		"plain shares without a rule": {gpu, firstGPU + "-share", ShareRules{}, map[string]string{CapacityMemory: "", CapacityCores: "100"}},
		"plain shares of a partition": {gpu, firstGPU + "-mig-19-0-share", rules,
			map[string]string{CapacityMemory: "", CapacityCores: "100"}},
		"unknown memory":                 {GPU{}, firstGPU + "-share", rules, map[string]string{CapacityShares: "2", CapacityCores: "100"}},
		"unknown profile":                {gpu, firstGPU + "-mig-99-0-share", rules, nil},
		"part of an instance":            {gpu, firstGPU + "-mig-19-0-ci-0-share", rules, nil},
		"partition of a GPU without MIG": {GPU{}, firstGPU + "-mig-19-0-share", rules, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n, ok := ParseName(c.device)
			if !ok {
				t.Fatal(c.device)
			}
			got := c.rules.Totals(c.gpu, 0, n)
			if len(got) != len(c.want) {
				t.Errorf("got %v", got)
			}
			for capacity, want := range c.want {
				q, known := got[capacity]
				if !known || want != "" && q.Cmp(resource.MustParse(want)) != 0 {
					t.Errorf("%s: %s", capacity, q.String())
				}
			}
		})
	}
}
