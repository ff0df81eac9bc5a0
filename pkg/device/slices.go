package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

// MaxDevicesPerSlice is the API's limit on devices in a slice if one of them has taints or consumes
// counters. A device may get a taint at any time, and moving devices to another slice makes the
// whole pool incomplete for a moment. So this limit applies to every slice from the start.
const MaxDevicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// SliceOption adds fields to slices that not every cluster supports.
type SliceOption func(*sliceOptions)

type sliceOptions struct{ partitionTypes string }

// PartitionTypes adds to each device an attribute that is equal for devices of equal cost, and
// names that attribute in the slice. With it, ResourcePoolStatusRequest can count what is left of
// each type. driverName is the attribute's domain. The cluster must have the feature gate
// DRAPartitionableDevicesType.
func PartitionTypes(driverName string) SliceOption {
	return func(o *sliceOptions) { o.partitionTypes = driverName }
}

// Slices splits the devices of one pool into ResourceSlices and keeps the order of shapes. Slices
// with counter sets come first, because a slice cannot have both counter sets and devices. Each
// counter set has the device name of its whole GPU.
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

// counterSets returns slices with one counter set for each GPU whose devices consume counters, in
// the order in which the GPUs first occur in shapes.
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
