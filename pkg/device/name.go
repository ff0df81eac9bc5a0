package device

import (
	"fmt"
	"regexp"
	"strconv"
)

// Name says which device is meant: a GPU as a whole, or a part of it.
type Name struct {
	// GPU is the name of the whole GPU.
	GPU string
	// Partition is nil for the whole.
	Partition *PartitionName
}

// PartitionName says which part of a GPU is meant. It names a place on the card, so that it is the same before the instance is made and after it was
// made again. The profile's ID stands in it because two profiles may differ in nothing of their names but "+me".
type PartitionName struct {
	ProfileID uint32
	Start     uint32
	// Compute is the ID of a compute instance that is less than its GPU instance. It is nil for the GPU instance with all that is in it.
	Compute *uint32
}

var nameForm = regexp.MustCompile(`^(gpu-[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7])(?:-mig-([0-9]+)-([0-9]+)(?:-ci-([0-9]+))?)?$`)

// ParseName reads the name of a device. It is false for one that this driver does not give.
func ParseName(s string) (Name, bool) {
	m := nameForm.FindStringSubmatch(s)
	if m == nil {
		return Name{}, false
	}
	n := Name{GPU: m[1]}
	if m[2] == "" {
		return n, true
	}
	var numbers [3]uint32
	for i, digits := range m[2:] {
		if digits == "" {
			continue
		}
		v, err := strconv.ParseUint(digits, 10, 32)
		if err != nil {
			return Name{}, false
		}
		numbers[i] = uint32(v)
	}
	n.Partition = &PartitionName{ProfileID: numbers[0], Start: numbers[1]}
	if m[4] != "" {
		n.Partition.Compute = &numbers[2]
	}
	if n.String() != s { // 07 is no number that String writes
		return Name{}, false
	}
	return n, true
}

// String is the name as the scheduler knows it: a DNS label of at most 60 letters.
func (n Name) String() string {
	p := n.Partition
	switch {
	case p == nil:
		return n.GPU
	case p.Compute == nil:
		return fmt.Sprintf("%s-mig-%d-%d", n.GPU, p.ProfileID, p.Start)
	default:
		return fmt.Sprintf("%s-mig-%d-%d-ci-%d", n.GPU, p.ProfileID, p.Start, *p.Compute)
	}
}

// DeviceNames are the names of all devices that the GPU can be or is: itself, every placement, and parts of instances that exist.
func (g GPU) DeviceNames() []string {
	whole := g.WholeName()
	names := []string{whole}
	if g.MIG == nil {
		return names
	}
	seen := map[string]bool{}
	add := func(p PartitionName) {
		name := Name{GPU: whole, Partition: &p}.String()
		if !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, p := range g.MIG.Profiles {
		for _, start := range p.Starts {
			add(PartitionName{ProfileID: p.ID, Start: start})
		}
	}
	for _, i := range g.MIG.Instances {
		for _, c := range i.Compute {
			add(i.partName(c))
		}
	}
	return names
}
