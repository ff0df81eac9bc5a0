package device

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// These attributes are defined by Kubernetes itself, so that a claim can match a GPU with a device
// of another driver. See k8s.io/dynamic-resource-allocation/deviceattribute.
const (
	AttrPCIeRoot resourceapi.QualifiedName = "resource.kubernetes.io/pcieRoot"
	AttrPCIBusID resourceapi.QualifiedName = "resource.kubernetes.io/pciBusID"
	AttrNUMANode resourceapi.QualifiedName = "resource.kubernetes.io/numaNode"
)

// These values are published for facts that the driver does not report, because a CEL selector that
// reads a missing attribute is an error. Such an error stops the scheduling of the Pod on all
// nodes.
const (
	// UUIDNotCreated is the attribute uuid of a partition that does not exist yet.
	UUIDNotCreated = "not-cut"
	// noAddressingMode is NVML's word for a GPU without an active addressing mode.
	noAddressingMode = "None"
	// unknownFact is published for what only NVML knows if NVML does not list the GPU.
	unknownFact = "Unknown"
	// noVersion is published for an unknown version. It is lower than every version, so no selector
	// for a minimum version matches it.
	noVersion = "0.0.0"
)

// identity returns the GPU's UUID. A GPU that NVML does not list has its PCI address instead, so
// that no two GPUs match each other by this attribute.
func (g GPU) identity() string {
	if g.PassthroughOnly() {
		return "PCI-" + string(g.PCIAddress)
	}
	return g.UUID
}

type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// commonAttributes returns the attributes that all devices of a GPU have. The attribute parentUUID
// is always the UUID of the GPU, even on the device for the whole GPU.
func commonAttributes(g GPU, d Driver) attributes {
	a := attributes{
		"parentUUID":     text(g.identity()),
		AttrPCIBusID:     text(string(g.PCIAddress)),
		"productName":    text(cmp.Or(g.ProductName, unknownFact)),
		"brand":          text(cmp.Or(g.Brand, unknownFact)),
		"architecture":   text(cmp.Or(g.Architecture, unknownFact)),
		"addressingMode": text(cmp.Or(g.AddressingMode, noAddressingMode)),
	}
	a.version("cudaComputeCapability", g.CUDAComputeCapability)
	// CEL can compare semantic versions. The version as the driver writes it ("580.65.06") is not one.
	a.version("driverVersion", d.Version)
	a.version("cudaDriverVersion", d.CUDAVersion)
	a["driverVersionString"] = text(cmp.Or(d.Version, unknownFact))
	if g.PCIeRoot != "" {
		a[AttrPCIeRoot] = text(g.PCIeRoot)
	}
	if g.NUMANode != nil {
		a[AttrNUMANode] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(*g.NUMANode))}
	}
	return a
}

// AllocatedAttributes returns the attributes with which the device n of the GPU g is published.
// fractions says which kind of shares a shared device has. A partition that the inventory does not
// have yet has [UUIDNotCreated].
func AllocatedAttributes(g GPU, n Name, fractions bool, d Driver) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	if n.Passthrough {
		return VFIO{gpu: g}.Device(d).Attributes
	}
	of, _, known := g.shareable(n)
	if !known {
		of = Partition{gpu: g, part: *n.Partition}
	}
	if n.Share {
		return Shared{of, Share{Fractions: fractions}}.Device(d).Attributes
	}
	return of.Device(d).Attributes
}

// text returns a string attribute. It truncates s to the API's limit, because one longer product
// name would make the whole pool invalid.
func text(s string) resourceapi.DeviceAttribute {
	if len(s) > resourceapi.DeviceAttributeMaxValueLength {
		s = strings.ToValidUTF8(s[:resourceapi.DeviceAttributeMaxValueLength], "")
	}
	return resourceapi.DeviceAttribute{StringValue: ptr.To(s)}
}

func (a attributes) version(name resourceapi.QualifiedName, v string) {
	s, err := Semver(v)
	if err != nil {
		s = noVersion
	}
	a[name] = resourceapi.DeviceAttribute{VersionValue: ptr.To(s)}
}

// Semver converts a dotted version of one to three numbers to strict semver: three numbers without
// leading zeros. "580.65.06" becomes "580.65.6", and "13.0" becomes "13.0.0".
func Semver(v string) (string, error) {
	parts := strings.Split(v, ".")
	if len(parts) > 3 {
		return "", fmt.Errorf("version %q: more than three numbers", v)
	}
	numbers := [3]uint64{}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 10, 32)
		if err != nil {
			return "", fmt.Errorf("version %q: %q is not a number", v, p)
		}
		numbers[i] = n
	}
	return fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2]), nil
}

// perProduct returns the type of a partition for ResourcePoolStatusRequest: the text in what and
// the product name, because the same profile costs other counters on another product.
func perProduct(what string, g GPU) string { return what + " of " + g.ProductName }

func number(n uint32) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{IntValue: ptr.To(int64(n))}
}

// capacities returns the capacities of an unshared device. Unknown values are published as 0,
// because a selector that reads a missing capacity is an error. A 0 matches no selector for a
// minimum.
func capacities(memory uint64, known *Engines) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	e := ptr.Deref(known, Engines{})
	c := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: *resource.NewQuantity(int64(min(memory, math.MaxInt64)), resource.BinarySI)},
	}
	for name, n := range map[resourceapi.QualifiedName]uint32{
		"multiprocessors": e.Multiprocessors,
		"copyEngines":     e.CopyEngines,
		"decoders":        e.Decoders,
		"encoders":        e.Encoders,
		"jpegEngines":     e.JPEGEngines,
		"ofaEngines":      e.OFAEngines,
	} {
		c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
	}
	return c
}
