package device

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Attributes that Kubernetes itself defines, so that GPUs can be matched with the devices of other drivers.
// See k8s.io/dynamic-resource-allocation/deviceattribute.
const (
	AttrPCIeRoot resourceapi.QualifiedName = "resource.kubernetes.io/pcieRoot"
	AttrPCIBusID resourceapi.QualifiedName = "resource.kubernetes.io/pciBusID"
	AttrNUMANode resourceapi.QualifiedName = "resource.kubernetes.io/numaNode"
)

// What a fact has for a value that nobody knows. Every device of a type has the same keys, because
// Kubernetes' allocator takes a selector that reads a missing key for an error, not for "no match",
// and the error ends the scheduling of the Pod on all nodes.
const (
	// NotCut is the uuid of a partition that is not cut yet.
	NotCut = "not-cut"
	// noAddressingMode is NVML's word for a platform on which none is active.
	noAddressingMode = "None"
	// noVersion is older than every version, so that no selector for a minimum matches it.
	noVersion = "0.0.0"
)

type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// common are the attributes of every shape of a GPU. parentUUID is the GPU's own where it is whole.
func common(g GPU, d Driver) attributes {
	a := attributes{
		"parentUUID":     text(g.UUID),
		AttrPCIBusID:     text(string(g.PCIAddress)),
		"productName":    text(g.ProductName),
		"brand":          text(g.Brand),
		"architecture":   text(g.Architecture),
		"addressingMode": text(cmp.Or(g.AddressingMode, noAddressingMode)),
	}
	a.driver(d)
	a.version("cudaComputeCapability", g.CUDAComputeCapability)
	a.place(g)
	return a
}

// text is a string attribute, cut to the API's limit: a product name of 70 letters must not cost the node its pool.
func text(s string) resourceapi.DeviceAttribute {
	if len(s) > resourceapi.DeviceAttributeMaxValueLength {
		s = strings.ToValidUTF8(s[:resourceapi.DeviceAttributeMaxValueLength], "")
	}
	return resourceapi.DeviceAttribute{StringValue: ptr.To(s)}
}

// driver sets the versions in semver, by which CEL can compare them, and the driver's own spelling ("580.65.06"), which semver forbids.
func (a attributes) driver(d Driver) {
	a.version("driverVersion", d.Version)
	a.version("cudaDriverVersion", d.CUDAVersion)
	a["driverVersionString"] = text(d.Version)
}

func (a attributes) version(name resourceapi.QualifiedName, v string) {
	s, err := Semver(v)
	if err != nil {
		s = noVersion
	}
	a[name] = resourceapi.DeviceAttribute{VersionValue: ptr.To(s)}
}

func (a attributes) place(g GPU) {
	if g.PCIeRoot != "" {
		a[AttrPCIeRoot] = text(g.PCIeRoot)
	}
	if g.NUMANode != nil {
		a[AttrNUMANode] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(*g.NUMANode))}
	}
}

// Semver turns a dotted version of one to three numbers into strict semver: three numbers without leading zeros.
// "580.65.06" becomes "580.65.6", "13.0" becomes "13.0.0".
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
