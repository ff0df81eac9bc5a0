package device

import (
	"math"
	"strings"

	"github.com/blang/semver/v4"
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

// Attributes are the attributes of one device.
type Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// text returns a string attribute. It truncates s to the API's limit, because one longer product
// name would make the whole pool invalid.
func text(s string) resourceapi.DeviceAttribute {
	if len(s) > resourceapi.DeviceAttributeMaxValueLength {
		s = strings.ToValidUTF8(s[:resourceapi.DeviceAttributeMaxValueLength], "")
	}
	return resourceapi.DeviceAttribute{StringValue: ptr.To(s)}
}

// version returns a version attribute, which is strict semver: "580.65.06" becomes "580.65.6", and
// "13.0" becomes "13.0.0". Whatever is no version becomes [noVersion].
func version(s string) resourceapi.DeviceAttribute {
	v, err := semver.ParseTolerant(s)
	if err != nil {
		return resourceapi.DeviceAttribute{VersionValue: ptr.To(noVersion)}
	}
	return resourceapi.DeviceAttribute{VersionValue: ptr.To(v.FinalizeVersion())}
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
