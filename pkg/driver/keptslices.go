package driver

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// keptSlice is a slice as it goes over the wire. Hundreds of devices, which change once in days, take a tenth of the memory that way, and two of them are the
// same if their bytes are.
type keptSlice string

func keep(all []resourceslice.Slice) ([]keptSlice, error) {
	kept := make([]keptSlice, len(all))
	for i, s := range all {
		spec := specOf(s)
		raw, err := spec.Marshal()
		if err != nil {
			return nil, fmt.Errorf("slice %d of %d: %w", i+1, len(all), err)
		}
		kept[i] = keptSlice(raw)
	}
	return kept, nil
}

func unkeep(kept []keptSlice) ([]resourceslice.Slice, error) {
	all := make([]resourceslice.Slice, len(kept))
	for i, k := range kept {
		var spec resourceapi.ResourceSliceSpec
		if err := spec.Unmarshal([]byte(k)); err != nil {
			return nil, fmt.Errorf("slice %d of %d: %w", i+1, len(kept), err)
		}
		all[i] = sliceOf(spec)
	}
	return all, nil
}

// specOf has all that a slice says of itself; its driver, node and pool are the publisher's to add.
func specOf(s resourceslice.Slice) resourceapi.ResourceSliceSpec {
	return resourceapi.ResourceSliceSpec{
		Devices: s.Devices, SharedCounters: s.SharedCounters, PerDeviceNodeSelection: s.PerDeviceNodeSelection,
		PartitionTypeAttribute: s.PartitionTypeAttribute, SkipNodeOperations: s.SkipNodeOperations,
	}
}

func sliceOf(s resourceapi.ResourceSliceSpec) resourceslice.Slice {
	return resourceslice.Slice{
		Devices: s.Devices, SharedCounters: s.SharedCounters, PerDeviceNodeSelection: s.PerDeviceNodeSelection,
		PartitionTypeAttribute: s.PartitionTypeAttribute, SkipNodeOperations: s.SkipNodeOperations,
	}
}
