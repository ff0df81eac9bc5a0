package device

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// FractionTotals must return the capacities that the ResourceSlices publish for fractions of a
// device, so that the node and the scheduler limit claims by the same amounts.
func TestFractionTotalsEqualPublishedCapacities(t *testing.T) {
	seen := 0
	for _, s := range Offer(sharing(t, "[{kind: fractions}, {profile: '*', kind: fractions}]", node(t, h100Key, l40sKey)...)) {
		shared, is := s.(Shared)
		if !is {
			continue
		}
		seen++
		name, _ := ParseName(s.Name())
		got := FractionTotals(s.GPU(), name)
		published := shared.Device(Driver{}).Capacity
		if len(got) != len(published) {
			t.Errorf("%s: the totals are %v, but %v is published", s.Name(), got, published)
		}
		for capacity, published := range published {
			total, known := got[string(capacity)]
			if !known || total.Cmp(published.Value) != 0 {
				t.Errorf("the total of %s is %s of %s, but %s is published", s.Name(), total.String(), capacity, published.Value.String())
			}
		}
	}
	if seen < 2 {
		t.Errorf("%d shares are offered", seen)
	}
}

func TestUnknownCapacitiesHaveNoTotal(t *testing.T) {
	gpu := node(t, h100Key)[0]
	for name, c := range map[string]struct {
		gpu    GPU
		device string
		want   map[string]string
	}{
		"whole GPU":                      {gpu, firstGPU + "-share", map[string]string{CapacityMemory: "", CapacityCores: "100"}},
		"partition":                      {gpu, firstGPU + "-mig-19-0-share", map[string]string{CapacityMemory: "", CapacityCores: "100"}},
		"unknown memory":                 {GPU{}, firstGPU + "-share", map[string]string{CapacityCores: "100"}},
		"unknown profile":                {gpu, firstGPU + "-mig-99-0-share", nil},
		"part of an instance":            {gpu, firstGPU + "-mig-19-0-ci-0-share", nil},
		"partition of a GPU without MIG": {GPU{}, firstGPU + "-mig-19-0-share", nil},
	} {
		t.Run(name, func(t *testing.T) {
			n, ok := ParseName(c.device)
			if !ok {
				t.Fatal(c.device)
			}
			got := FractionTotals(c.gpu, n)
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
