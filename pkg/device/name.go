package device

import (
	"fmt"
	"regexp"
	"strconv"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Name says which device is meant: a GPU as a whole, or a part of it, for one claim alone or for several.
type Name struct {
	// GPU is the name of the whole GPU.
	GPU string
	// Partition is nil for the whole.
	Partition *PartitionName
	// Share says that several claims may hold the device, each a share of it.
	Share bool
}

// PartitionName says which part of a GPU is meant. It names a place on the card, so that it is the same before the instance is made and after it was
// made again. The profile's ID stands in it because two profiles may differ in nothing of their names but "+me".
type PartitionName struct {
	ProfileID uint32
	Start     uint32
	// Compute is the ID of a compute instance that is less than its GPU instance. It is nil for the GPU instance with all that is in it.
	Compute *uint32
}

var nameForm = regexp.MustCompile(`^(gpu-[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7])(?:-mig-([0-9]+)-([0-9]+)(?:-ci-([0-9]+))?)?(-share)?$`)

// ParseName reads the name of a device. It is false for one that this driver does not give.
func ParseName(s string) (Name, bool) {
	m := nameForm.FindStringSubmatch(s)
	if m == nil || len(s) > validation.DNS1123LabelMaxLength {
		return Name{}, false
	}
	n := Name{GPU: m[1], Share: m[5] != ""}
	if m[2] == "" {
		return n, true
	}
	var numbers [3]uint32
	for i, digits := range m[2:5] {
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

// String is the name as the scheduler knows it: a DNS label of at most 60 letters, and "-share" where several claims may hold the device. With numbers that
// no card has, a share's name is too long for a label: such a device is not offered.
func (n Name) String() string {
	s := n.GPU
	if p := n.Partition; p != nil {
		s = fmt.Sprintf("%s-mig-%d-%d", s, p.ProfileID, p.Start)
		if p.Compute != nil {
			s = fmt.Sprintf("%s-ci-%d", s, *p.Compute)
		}
	}
	if n.Share {
		s += "-share"
	}
	return s
}

// Unshared is the device that the share is of. A device that is held alone is its own.
func (n Name) Unshared() Name {
	n.Share = false
	return n
}

// DeviceNames are the names of all devices that the GPU can be or is: itself, every placement, parts of instances that exist, and a share of each. Shares are
// among them whether or not they are offered: a claim may hold one that was offered once.
func (g GPU) DeviceNames() []string {
	var names []string
	seen := map[string]bool{}
	add := func(p *PartitionName) {
		n := Name{GPU: g.WholeName(), Partition: p}
		if s := n.String(); !seen[s] {
			seen[s] = true
			n.Share = true
			names = append(names, s, n.String())
		}
	}
	add(nil)
	if g.MIG == nil {
		return names
	}
	for _, p := range g.MIG.Profiles {
		for _, start := range p.Starts {
			add(&PartitionName{ProfileID: p.ID, Start: start})
		}
	}
	for _, i := range g.MIG.Instances {
		for _, c := range i.Compute {
			part := i.partName(c)
			add(&part)
		}
	}
	return names
}
