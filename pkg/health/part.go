package health

import "github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"

// Part is what of a card a finding is about. The zero value is all of it.
type Part struct {
	// Instance is the place of a GPU instance. What shares memory with that place is reached too: it cannot exist beside that instance, and is
	// cut from the same memory.
	Instance *device.EventPlace `json:"instance,omitempty"`
	// Compute is the compute instance, where that is less than its GPU instance.
	Compute *uint32 `json:"compute,omitempty"`
	// Links says that only the card as a whole is reached, because partitions do without its links.
	Links bool `json:"links,omitempty"`
}

// reaches says whether a finding on this part of a card is one of the device.
func (p Part) reaches(n device.Name, g device.GPU) bool {
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
		return place(*n.Partition, g).Overlaps(p.Instance.Placement)
	}
}

// place is where a partition is. A profile that nobody knows any more takes at least one memory slice.
func place(n device.PartitionName, g device.GPU) device.Placement {
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

// name says in a key and in a log which part is meant: the end of a device's name.
func (p Part) name() string {
	if p.Instance == nil {
		return ""
	}
	const gpu = "gpu"
	n := device.Name{GPU: gpu, Partition: &device.PartitionName{ProfileID: p.Instance.ProfileID, Start: p.Instance.Start, Compute: p.Compute}}
	return n.String()[len(gpu):]
}

// covers says whether all that other reaches is reached by p as well.
func (p Part) covers(other Part) bool {
	return p == (Part{}) || p.name() == other.name() && p.Links == other.Links
}
