package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// MaxDevicesPerSlice is the API's limit for slices whose devices carry taints or consume counters. Taints can come at any time,
// and moving devices between slices makes the whole pool incomplete for a moment: so every slice is cut to this limit from the start.
const MaxDevicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// Slices cuts the devices of one pool into slices, in order.
func Slices(shapes []Shape, d Driver) []resourceslice.Slice {
	var slices []resourceslice.Slice
	for len(shapes) > 0 {
		n := min(len(shapes), MaxDevicesPerSlice)
		devices := make([]resourceapi.Device, n)
		for i, s := range shapes[:n] {
			devices[i] = s.Device(d)
		}
		slices = append(slices, resourceslice.Slice{Devices: devices})
		shapes = shapes[n:]
	}
	return slices
}
