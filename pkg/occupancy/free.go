package occupancy

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// free returns how many GPUs can be allocated whole, also to virtual machines, and for each GPU
// that is offered in partitions the largest one that can be allocated. taken has the names of the
// devices that claims have.
func free(published []resourceslice.Slice, taken sets.Set[string]) (gpus int, partitions []metrics.FreePartition) {
	left := remaining(published, taken)
	inUse := map[string]bool{} // GPUs of which claims have a part
	for name := range taken {
		if n, ok := device.ParseName(name); ok {
			inUse[n.GPU] = true
		}
	}
	whole, largest := map[string]bool{}, map[string]metrics.FreePartition{}
	for _, slice := range published {
		for _, d := range slice.Devices {
			n, ok := device.ParseName(d.Name)
			if !ok || n.Share {
				continue
			}
			can := !taken.Has(d.Name) && !blocked(d) && left.allow(d)
			if n.Partition == nil {
				if can && !inUse[n.GPU] {
					whole[n.GPU] = true
				}
				continue
			}
			best, known := largest[n.GPU]
			if !known {
				best.GPU = n.GPU
			}
			memory := d.Capacity[device.CapacityMemory].Value
			if bytes := memory.AsApproximateFloat64(); can && (best.Profile == "" || bytes > best.Bytes) {
				best.Profile, best.Bytes = ptr.Deref(d.Attributes["profile"].StringValue, ""), bytes
			}
			largest[n.GPU] = best
		}
	}
	for _, name := range slices.Sorted(maps.Keys(largest)) {
		partitions = append(partitions, largest[name])
	}
	return len(whole), partitions
}

// blocked reports whether a taint keeps the scheduler from allocating the device.
func blocked(d resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
}

// counters has what is left of each counter of each counter set.
type counters map[string]map[string]resource.Quantity

// remaining returns what the taken devices leave. All shares of a device consume its counters once.
func remaining(published []resourceslice.Slice, taken sets.Set[string]) counters {
	left := counters{}
	for _, slice := range published {
		for _, set := range slice.SharedCounters {
			left[set.Name] = map[string]resource.Quantity{}
			for name, c := range set.Counters {
				left[set.Name][name] = c.Value.DeepCopy()
			}
		}
	}
	for _, slice := range published {
		for _, d := range slice.Devices {
			if !taken.Has(d.Name) {
				continue
			}
			for _, consumption := range d.ConsumesCounters {
				for name, c := range consumption.Counters {
					if rest, ok := left[consumption.CounterSet][name]; ok {
						rest.Sub(c.Value)
						left[consumption.CounterSet][name] = rest
					}
				}
			}
		}
	}
	return left
}

// allow reports whether enough is left for the device.
func (l counters) allow(d resourceapi.Device) bool {
	for _, consumption := range d.ConsumesCounters {
		for name, c := range consumption.Counters {
			if rest := l[consumption.CounterSet][name]; rest.Cmp(c.Value) < 0 {
				return false
			}
		}
	}
	return true
}
