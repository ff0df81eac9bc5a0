package driver

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// encodedSlice is a slice in protobuf's wire format, which takes a tenth of the memory. The plugin
// keeps its slices so, because they change rarely. Equal slices have equal bytes.
type encodedSlice string

func encodeSlices(all []resourceslice.Slice) ([]encodedSlice, error) {
	encoded := make([]encodedSlice, len(all))
	for i, s := range all {
		spec := specOf(s)
		raw, err := spec.Marshal()
		if err != nil {
			return nil, fmt.Errorf("encode slice %d of %d: %w", i+1, len(all), err)
		}
		encoded[i] = encodedSlice(raw)
	}
	return encoded, nil
}

func decodeSlices(encoded []encodedSlice) ([]resourceslice.Slice, error) {
	all := make([]resourceslice.Slice, len(encoded))
	for i, e := range encoded {
		var spec resourceapi.ResourceSliceSpec
		if err := spec.Unmarshal([]byte(e)); err != nil {
			return nil, fmt.Errorf("decode slice %d of %d: %w", i+1, len(encoded), err)
		}
		all[i] = sliceOf(spec)
	}
	return all, nil
}

// specOf returns the slice as a ResourceSliceSpec without driver, node and pool. The publisher adds
// these when it writes the spec.
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
