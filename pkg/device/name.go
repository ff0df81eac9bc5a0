package device

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// DriverName is this driver's name in DeviceClasses, in ResourceSlices and at the kubelet. The keys
// of its taints and annotations begin with it.
const DriverName = "gpu.nvidia.com"

// PCIAddress is the address of a PCI function as sysfs writes it: "0000:1b:00.0", in lower case,
// with at least four domain digits.
type PCIAddress string

var pciAddressForm = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// ParsePCIAddress parses an address as sysfs or NVML writes it. NVML uses upper case and eight
// domain digits. A domain that needs more than four digits keeps all of them.
func ParsePCIAddress(s string) (PCIAddress, error) {
	m := pciAddressForm.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return "", fmt.Errorf("PCI address %q: want domain:bus:device.function in hexadecimal, as in 0000:1b:00.0", s)
	}
	domain, err := strconv.ParseUint(m[1], 16, 32)
	return PCIAddress(fmt.Sprintf("%04x:%s:%s.%s", domain, m[2], m[3], m[4])), err
}

// WholeName returns the device name of the whole GPU at this address, such as gpu-0000-1b-00-0. It
// has "-" instead of ":" and ".", because device names must be DNS labels.
func (a PCIAddress) WholeName() string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(string(a))
}

// Name is a parsed device name. It identifies a whole GPU or a part of it, for one claim alone or
// for several.
type Name struct {
	// GPU is the device name of the whole GPU, such as gpu-0000-1b-00-0.
	GPU string
	// Partition identifies a part of the GPU. It is nil for the whole GPU.
	Partition *PartitionName
	// Share is true for the device that several claims may use, each with a share.
	Share bool
	// Passthrough is true for the whole GPU bound to a VFIO driver, as virtual machines get it.
	Passthrough bool
}

// PartitionName identifies a part of a GPU by its placement. So the name is the same before the GPU
// instance is created and after it is created again. The profile's ID is used because the names of
// two profiles may differ only in "+me".
type PartitionName struct {
	ProfileID uint32
	Start     uint32
	// Compute is the ID of a compute instance that is smaller than its GPU instance. It is nil for the
	// whole GPU instance.
	Compute *uint32
}

var nameForm = regexp.MustCompile(`^(gpu-[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7])` +
	`(?:(-vfio)|(?:-mig-([0-9]+)-([0-9]+)(?:-ci-([0-9]+))?)?(-share)?)$`)

// ParseName parses a device name. The second result is false if s is not a device name of this
// driver.
func ParseName(s string) (Name, bool) {
	m := nameForm.FindStringSubmatch(s)
	if m == nil || len(s) > validation.DNS1123LabelMaxLength {
		return Name{}, false
	}
	n := Name{GPU: m[1], Passthrough: m[2] != "", Share: m[6] != ""}
	if m[3] == "" {
		return n, true
	}
	var numbers [3]uint32
	for i, digits := range m[3:6] {
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
	if m[5] != "" {
		n.Partition.Compute = &numbers[2]
	}
	if n.String() != s { // String never writes a number as 07
		return Name{}, false
	}
	return n, true
}

// String returns the device name that the scheduler uses. It is a DNS label, except for shares with
// numbers that are larger than on any known card. Such devices are not offered.
func (n Name) String() string {
	s := n.GPU
	if p := n.Partition; p != nil {
		s = fmt.Sprintf("%s-mig-%d-%d", s, p.ProfileID, p.Start)
		if p.Compute != nil {
			s = fmt.Sprintf("%s-ci-%d", s, *p.Compute)
		}
	}
	switch {
	case n.Share:
		s += "-share"
	case n.Passthrough:
		s += "-vfio"
	}
	return s
}

// Unshared returns the name of the device that is shared if n names a share device. It returns any
// other name unchanged.
func (n Name) Unshared() Name {
	n.Share = false
	return n
}

// PCIAddress returns the GPU's address. It is the inverse of [PCIAddress.WholeName].
func (n Name) PCIAddress() PCIAddress {
	parts := strings.Split(n.GPU, "-")
	if len(parts) != 5 {
		return ""
	}
	return PCIAddress(fmt.Sprintf("%s:%s:%s.%s", parts[1], parts[2], parts[3], parts[4]))
}

// Type returns the device's attribute "type".
func (n Name) Type() string {
	kind := "gpu"
	switch {
	case n.Passthrough:
		return "vfio"
	case n.Partition != nil:
		kind = "mig"
	}
	if n.Share {
		kind += "-share"
	}
	return kind
}

// DeviceNames returns the names of all devices that the GPU may be offered as: for virtual
// machines, the whole GPU, every placement, and existing compute instances, the latter three also
// as share devices. It includes those that are not offered, because a claim may have one that was
// offered earlier.
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
	if g.Passthrough != nil {
		names = append(names, Name{GPU: g.WholeName(), Passthrough: true}.String())
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
			part := i.partitionName(c)
			add(&part)
		}
	}
	return names
}
