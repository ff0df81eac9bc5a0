package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

// MaxDevicesPerSlice is the API's limit for slices whose devices carry taints or consume counters. Taints can come at any time,
// and moving devices between slices makes the whole pool incomplete for a moment: so every slice is cut to this limit from the start.
const MaxDevicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// SliceOption adds to slices what not every cluster knows.
type SliceOption func(*sliceOptions)

type sliceOptions struct{ partitionTypes string }

// PartitionTypes names in each slice the attribute that says which devices cost the same, so that ResourcePoolStatusRequest can count what is left of each
// kind. driverName is the attribute's domain. Only for clusters with the feature gate DRAPartitionableDevicesType.
func PartitionTypes(driverName string) SliceOption {
	return func(o *sliceOptions) { o.partitionTypes = driverName }
}

// Slices cuts the devices of one pool into slices, in order. Slices with counter sets come before those with devices: a slice holds one or the other.
// A GPU's counter set has the name of the whole GPU.
func Slices(shapes []Shape, d Driver, options ...SliceOption) []resourceslice.Slice {
	var o sliceOptions
	for _, option := range options {
		option(&o)
	}
	slices := counterSets(shapes)
	for len(shapes) > 0 {
		n := min(len(shapes), MaxDevicesPerSlice)
		slices = append(slices, o.slice(shapes[:n], d))
		shapes = shapes[n:]
	}
	return slices
}

const partitionTypeAttribute = "partitionType"

func (o sliceOptions) slice(shapes []Shape, d Driver) resourceslice.Slice {
	slice := resourceslice.Slice{Devices: make([]resourceapi.Device, len(shapes))}
	for i, s := range shapes {
		device := s.Device(d)
		if o.partitionTypes != "" && len(device.ConsumesCounters) > 0 {
			device.Attributes[partitionTypeAttribute] = text(s.partitionType())
			slice.PartitionTypeAttribute = ptr.To(resourceapi.FullyQualifiedName(o.partitionTypes + "/" + partitionTypeAttribute))
		}
		slice.Devices[i] = device
	}
	return slice
}

// counterSets has one set for each GPU whose shapes overlap, in the order in which the GPUs first appear.
func counterSets(shapes []Shape) []resourceslice.Slice {
	var sets []resourceapi.CounterSet
	seen := map[string]bool{}
	for _, s := range shapes {
		name := s.GPU().WholeName()
		if all := s.counted(); all != nil && !seen[name] {
			seen[name] = true
			sets = append(sets, resourceapi.CounterSet{Name: name, Counters: all.counters()})
		}
	}
	var slices []resourceslice.Slice
	for len(sets) > 0 {
		n := min(len(sets), resourceapi.ResourceSliceMaxCounterSets)
		slices = append(slices, resourceslice.Slice{SharedCounters: sets[:n:n]})
		sets = sets[n:]
	}
	return slices
}
