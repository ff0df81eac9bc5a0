package fleet

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// sharer lets equal parts of devices share their memory. A large fleet has tens of thousands of
// devices, but few different ones. The parts are never changed afterwards.
type sharer struct {
	texts      map[string]*string
	numbers    map[int64]*int64
	capacities map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
	counters   map[string]map[string]resourceapi.Counter
}

func newSharer() *sharer {
	return &sharer{
		map[string]*string{}, map[int64]*int64{},
		map[string]map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}, map[string]map[string]resourceapi.Counter{},
	}
}

func shared[K comparable, V any](known map[K]V, k K, v V) V {
	if old, ok := known[k]; ok {
		return old
	}
	known[k] = v
	return v
}

// slice makes the devices of a slice share their parts with those of earlier slices.
func (s *sharer) slice(slice *resourceapi.ResourceSlice) {
	for i := range slice.Spec.Devices {
		d := &slice.Spec.Devices[i]
		for name, a := range d.Attributes {
			if a.StringValue != nil {
				a.StringValue = shared(s.texts, *a.StringValue, a.StringValue)
			}
			if a.VersionValue != nil {
				a.VersionValue = shared(s.texts, *a.VersionValue, a.VersionValue)
			}
			if a.IntValue != nil {
				a.IntValue = shared(s.numbers, *a.IntValue, a.IntValue)
			}
			d.Attributes[name] = a
		}
		var key strings.Builder
		for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
			c := d.Capacity[name]
			fmt.Fprintf(&key, "%s=%s,", name, c.Value.String())
			if p := c.RequestPolicy; p != nil {
				fmt.Fprintf(&key, "%s", p.String())
			}
		}
		d.Capacity = shared(s.capacities, key.String(), d.Capacity)
		for j := range d.ConsumesCounters {
			key.Reset()
			of := &d.ConsumesCounters[j]
			for _, name := range slices.Sorted(maps.Keys(of.Counters)) {
				c := of.Counters[name]
				fmt.Fprintf(&key, "%s=%s,", name, c.Value.String())
			}
			of.Counters = shared(s.counters, key.String(), of.Counters)
		}
	}
}
