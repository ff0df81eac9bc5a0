package device

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

// MaxDevicesPerSlice is the API's limit on devices in a slice if one of them has taints or consumes
// counters. A device may get a taint at any time, and moving devices to another slice makes the
// whole pool incomplete for a moment. So this limit applies to every slice from the start.
const MaxDevicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// PartitionTypes is the name of an attribute that is equal for devices of equal cost. The slice
// names that attribute, so that ResourcePoolStatusRequest can count what is left of each type. The
// cluster must have the feature gate DRAPartitionableDevicesType.
const PartitionTypes = "partitionType"

// Slices splits the devices of one pool into ResourceSlices and keeps the order of shapes. Slices
// with counter sets come first, because a slice cannot have both counter sets and devices. Each
// counter set has the device name of its whole GPU. partitionTypes adds the attribute
// [PartitionTypes] to each device that consumes counters.
func Slices(shapes []Shape, d Driver, partitionTypes bool) []resourceslice.Slice {
	all := counterSets(shapes)
	for some := range slices.Chunk(shapes, MaxDevicesPerSlice) {
		slice := resourceslice.Slice{Devices: make([]resourceapi.Device, len(some))}
		for i, s := range some {
			device := s.Device(d)
			if partitionTypes && len(device.ConsumesCounters) > 0 {
				device.Attributes[PartitionTypes] = text(s.partitionType())
				slice.PartitionTypeAttribute = ptr.To(resourceapi.FullyQualifiedName(DriverName + "/" + PartitionTypes))
			}
			slice.Devices[i] = device
		}
		all = append(all, slice)
	}
	return all
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
	var all []resourceslice.Slice
	for some := range slices.Chunk(sets, resourceapi.ResourceSliceMaxCounterSets) {
		all = append(all, resourceslice.Slice{SharedCounters: some})
	}
	return all
}
