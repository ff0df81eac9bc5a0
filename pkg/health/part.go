package health

import "github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"

// Part is the part of a card that a finding is about. The zero value is the whole card.
type Part struct {
	// Instance is the placement of the GPU instance with the fault. The finding also affects GPU
	// instances at overlapping placements, because they would use the same memory.
	Instance *device.EventPlace `json:"instance,omitempty"`
	// Compute is the ID of the compute instance with the fault. It is nil if the compute instance
	// fills its GPU instance.
	Compute *uint32 `json:"compute,omitempty"`
	// Links is true for a fault of NVLink. It affects only the whole GPU, because partitions do not
	// use NVLink.
	Links bool `json:"links,omitempty"`
}

// affects reports whether a finding on the part p of a card affects the device n of the GPU g.
func (p Part) affects(n device.Name, g device.GPU) bool {
	switch {
	case n.Partition == nil:
		return true
	case p.Links:
		return false
	case p.Instance == nil:
		return true
	case n.Partition.ProfileID == p.Instance.ProfileID && n.Partition.Start == p.Instance.Start:
		return p.Compute == nil || n.Partition.Compute == nil || *p.Compute == *n.Partition.Compute
	default:
		return placementOf(*n.Partition, g).Overlaps(p.Instance.Placement)
	}
}

// placementOf returns the placement of the partition n. If the GPU does not list the partition's
// profile or instance, placementOf assumes a size of one memory slice.
func placementOf(n device.PartitionName, g device.GPU) device.Placement {
	profile, known := g.Profile(n.ProfileID)
	if known {
		return device.Placement{Start: n.Start, Size: profile.Size}
	}
	if g.MIG != nil {
		for _, i := range g.MIG.Instances {
			if i.ProfileID == n.ProfileID && i.Placement.Start == n.Start {
				return i.Placement
			}
		}
	}
	return device.Placement{Start: n.Start, Size: 1}
}

// suffix returns what a device name has after the GPU's name, such as "-mig-19-2". It is empty for
// the whole card.
func (p Part) suffix() string {
	if p.Instance == nil {
		return ""
	}
	const gpu = "gpu"
	n := device.Name{GPU: gpu, Partition: &device.PartitionName{ProfileID: p.Instance.ProfileID, Start: p.Instance.Start, Compute: p.Compute}}
	return n.String()[len(gpu):]
}

// covers reports whether a finding on the part p affects at least all devices that a finding on the
// part given by other affects.
func (p Part) covers(other Part) bool {
	return p == (Part{}) || p.suffix() == other.suffix() && p.Links == other.Links
}
