package device

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

// checkAPILimits fails the test if a slice exceeds a limit of the API. The limits must hold even
// after taints for unhealthy devices are added later.
func checkAPILimits(t *testing.T, m machine) {
	t.Helper()
	names := sets.New[string]()
	counters := checkCounters(t, m)
	for _, s := range m.Slices {
		if len(s.Spec.SharedCounters) > 0 {
			continue
		}
		if n := len(s.Spec.Devices); n == 0 || n > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
			t.Errorf("%s has %d devices", s.Name, n)
		}
		for _, d := range s.Spec.Devices {
			if names.Has(d.Name) {
				t.Errorf("two devices are named %s: the scheduler would drop the pool", d.Name)
			}
			names.Insert(d.Name)
			for _, msg := range validation.IsDNS1123Label(d.Name) {
				t.Errorf("device %q: %s", d.Name, msg)
			}
			if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
				t.Errorf("device %s has %d attributes and capacities", d.Name, n)
			}
			for name, a := range d.Attributes {
				checkAttribute(t, d.Name, name, a)
			}
			for name, c := range d.Capacity {
				checkName(t, d.Name, name)
				checkRequestPolicy(t, d, name, c)
			}
			checkConsumption(t, d, counters)
		}
	}
	if n := len(Offer(m.offerings)); names.Len() != n {
		t.Errorf("%d devices for %d shapes", names.Len(), n)
	}
}

func checkAttribute(t *testing.T, device string, name resourceapi.QualifiedName, a resourceapi.DeviceAttribute) {
	t.Helper()
	checkName(t, device, name)
	set := 0
	if a.StringValue != nil {
		set++
		if len(*a.StringValue) > resourceapi.DeviceAttributeMaxValueLength || *a.StringValue == "" {
			t.Errorf("device %s: %s is %q", device, name, *a.StringValue)
		}
	}
	if a.VersionValue != nil {
		set++
		if strict := *version(*a.VersionValue).VersionValue; strict != *a.VersionValue {
			t.Errorf("device %s: %s is %q, not strict semver", device, name, *a.VersionValue)
		}
	}
	if a.IntValue != nil {
		set++
	}
	if a.BoolValue != nil {
		set++
	}
	if set != 1 {
		t.Errorf("device %s: %s has %d values", device, name, set)
	}
}

func checkName(t *testing.T, device string, name resourceapi.QualifiedName) {
	t.Helper()
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "", string(name)
	}
	if qualified && (len(validation.IsDNS1123Subdomain(domain)) > 0 || len(domain) > resourceapi.DeviceMaxDomainLength) ||
		len(validation.IsCIdentifier(id)) > 0 || len(id) > resourceapi.DeviceMaxIDLength {
		t.Errorf("device %s: %q is not a qualified name", device, name)
	}
}

// checkCounters fails the test if a counter set exceeds a limit of the API. It returns the counters
// of each counter set, by the counter set's name.
func checkCounters(t *testing.T, m machine) map[string]map[string]resourceapi.Counter {
	t.Helper()
	all := map[string]map[string]resourceapi.Counter{}
	for i, s := range m.Slices {
		if len(s.Spec.SharedCounters) == 0 {
			continue
		}
		if i > 0 && len(m.Slices[i-1].Spec.SharedCounters) == 0 {
			t.Errorf("%s has counters and comes after one with devices", s.Name)
		}
		if len(s.Spec.Devices) > 0 || len(s.Spec.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets {
			t.Errorf("%s has %d counter sets and also %d devices", s.Name, len(s.Spec.SharedCounters), len(s.Spec.Devices))
		}
		for _, set := range s.Spec.SharedCounters {
			if _, twice := all[set.Name]; twice {
				t.Errorf("two counter sets are named %s", set.Name)
			}
			all[set.Name] = set.Counters
			if n := len(set.Counters); n == 0 || n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
				t.Errorf("counter set %s has %d counters", set.Name, n)
			}
			for name := range set.Counters {
				if msgs := append(validation.IsDNS1123Label(name), validation.IsDNS1123Label(set.Name)...); len(msgs) > 0 {
					t.Errorf("counter %s of set %s: %v", name, set.Name, msgs)
				}
			}
		}
	}
	return all
}

// checkConsumption fails the test if the device consumes a counter that does not exist, or more of
// a counter than its total.
func checkConsumption(t *testing.T, d resourceapi.Device, all map[string]map[string]resourceapi.Counter) {
	t.Helper()
	if len(d.ConsumesCounters) > resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice {
		t.Errorf("device %s consumes from %d counter sets", d.Name, len(d.ConsumesCounters))
	}
	for _, c := range d.ConsumesCounters {
		if len(c.Counters) == 0 || len(c.Counters) > resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption {
			t.Errorf("device %s consumes %d counters of %s", d.Name, len(c.Counters), c.CounterSet)
		}
		for name, want := range c.Counters {
			if has, ok := all[c.CounterSet][name]; !ok || has.Value.Cmp(want.Value) < 0 || want.Value.Sign() <= 0 {
				t.Errorf("device %s consumes %s of counter %s in %s, which has %s", d.Name, want.Value.String(), name, c.CounterSet, has.Value.String())
			}
		}
	}
}

// checkRequestPolicy fails the test if the API server would reject the capacity, or if the capacity
// has no request policy. Without one, the first claim that does not request the capacity would get
// all of it.
func checkRequestPolicy(t *testing.T, d resourceapi.Device, name resourceapi.QualifiedName, c resourceapi.DeviceCapacity) {
	t.Helper()
	if shared := ptr.Deref(d.AllowMultipleAllocations, false); shared != (c.RequestPolicy != nil) {
		t.Errorf("device %s is shared: %v; its %s has a policy: %v", d.Name, shared, name, !shared)
	}
	if c.RequestPolicy == nil {
		return
	}
	p := c.RequestPolicy
	if len(p.ValidValues) > 0 { // a withdrawn share
		if p.ValidRange != nil || len(p.ValidValues) != 1 || p.Default == nil || p.Default.Cmp(p.ValidValues[0]) != 0 ||
			p.Default.Cmp(c.Value) != 0 {
			t.Errorf("device %s: %s of %s allows values %v, default %v", d.Name, name, c.Value.String(), p.ValidValues, p.Default)
		}
		return
	}
	if p.Default == nil || p.ValidRange == nil || p.ValidRange.Min == nil || p.ValidRange.Max == nil || p.ValidRange.Step == nil {
		t.Errorf("device %s: the policy of %s is not complete", d.Name, name)
		return
	}
	least, most, step, total := p.ValidRange.Min.Value(), p.ValidRange.Max.Value(), p.ValidRange.Step.Value(), c.Value.Value()
	if least < 0 || most > total || step <= 0 || least+step > total || (most-least)%step != 0 {
		t.Errorf("device %s: %s goes from %d to %d of %d in steps of %d", d.Name, name, least, most, total, step)
	}
	if n := p.Default.Value(); n < least || n > most || (n-least)%step != 0 {
		t.Errorf("device %s: the default of %s is %d, not one of %d to %d in steps of %d", d.Name, name, n, least, most, step)
	}
}
