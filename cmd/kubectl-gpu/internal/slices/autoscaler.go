package slices

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// List is a list of slices.
type List struct {
	metav1.TypeMeta `json:",inline"`
	Items           []resourceapi.ResourceSlice `json:"items"`
}

// ForClusterAutoscaler returns the slices as the Cluster Autoscaler's cloud providers must return
// them for a node group without nodes: plain ResourceSlices of one node, for the field
// LocalResourceSlices of its NodeInfo.
// https://github.com/kubernetes/autoscaler/blob/55c37cd5eb/cluster-autoscaler/docs/dra_support.md
func ForClusterAutoscaler(t Template) List {
	return List{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}, Items: t.Slices}
}

// DynamicResourceTemplate is the object that Karpenter plans for node pools whose devices its cloud
// provider does not know. Its fields are those of Karpenter's type cloudprovider.DynamicResources.
// https://github.com/kubernetes-sigs/karpenter/pull/3285
// https://github.com/kubernetes-sigs/karpenter/blob/226646810/pkg/cloudprovider/dynamicresources.go
type DynamicResourceTemplate struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		ResourceSliceTemplates []SliceTemplate    `json:"resourceSliceTemplates"`
		AttributeBindings      []AttributeBinding `json:"attributeBindings,omitempty"`
	} `json:"spec"`
}

// SliceTemplate is a slice without what only a running node knows.
type SliceTemplate struct {
	Driver         string                   `json:"driver"`
	PoolName       string                   `json:"poolName"`
	SharedCounters []resourceapi.CounterSet `json:"sharedCounters,omitempty"`
	Devices        []DeviceTemplate         `json:"devices,omitempty"`
}

// DeviceTemplate has those fields of a device that Karpenter reads.
type DeviceTemplate struct {
	Name                     string                                                    `json:"name"`
	Attributes               map[resourceapi.QualifiedName]resourceapi.DeviceAttribute `json:"attributes,omitempty"`
	Capacity                 map[resourceapi.QualifiedName]resourceapi.DeviceCapacity  `json:"capacity,omitempty"`
	AllowMultipleAllocations *bool                                                     `json:"allowMultipleAllocations,omitempty"`
	ConsumesCounters         []resourceapi.DeviceCounterConsumption                    `json:"consumesCounters,omitempty"`
}

// AttributeBinding says that devices will have one value of an attribute, which is not known yet.
type AttributeBinding struct {
	Attribute resourceapi.FullyQualifiedName `json:"attribute"`
	Devices   []string                       `json:"devices"`
}

// ForKarpenter returns the slices as a DynamicResourceTemplate. Attributes that differ between two
// nodes of a kind are left out. Those that devices of one node share become bindings, so that
// Karpenter can keep a claim's matchAttribute.
func ForKarpenter(name string, t Template) DynamicResourceTemplate {
	out := DynamicResourceTemplate{TypeMeta: metav1.TypeMeta{APIVersion: "karpenter.sh/v1alpha1", Kind: "DynamicResourceTemplate"}}
	out.Metadata.Name = name
	var bound bindings
	for _, slice := range t.Slices {
		template := SliceTemplate{
			Driver: slice.Spec.Driver, PoolName: slice.Spec.Pool.Name, SharedCounters: slice.Spec.SharedCounters,
		}
		for _, d := range slice.Spec.Devices {
			bound.add(d)
			template.Devices = append(template.Devices, DeviceTemplate{
				Name: d.Name, Attributes: withoutNode(d.Attributes), Capacity: d.Capacity,
				AllowMultipleAllocations: d.AllowMultipleAllocations, ConsumesCounters: d.ConsumesCounters,
			})
		}
		out.Spec.ResourceSliceTemplates = append(out.Spec.ResourceSliceTemplates, template)
	}
	out.Spec.AttributeBindings = bound.shared()
	return out
}

const attrParentUUID = "parentUUID"

// withoutNode returns the attributes without those that differ between two nodes of a kind.
func withoutNode(all map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	kept := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for name, value := range all {
		switch name {
		case attrParentUUID, device.AttrPCIBusID, device.AttrPCIeRoot:
			continue
		case "uuid":
			// A partition that is created on demand has no UUID on any node.
			if value.StringValue == nil || *value.StringValue != device.UUIDNotCreated {
				continue
			}
		}
		kept[name] = value
	}
	return kept
}

// bindings collects which devices share the value of an attribute.
type bindings struct {
	order   []binding
	devices map[binding][]string
}

// binding is an attribute, and what is equal for the devices that share its value.
type binding struct{ attribute, of string }

func (b *bindings) add(d resourceapi.Device) {
	if b.devices == nil {
		b.devices = map[binding][]string{}
	}
	text := func(name resourceapi.QualifiedName) string {
		if v := d.Attributes[name].StringValue; v != nil {
			return *v
		}
		return ""
	}
	gpu := text(device.AttrPCIBusID)
	root := text(device.AttrPCIeRoot)
	if root == "" {
		root = gpu // the devices of one GPU have the same root, whichever it is
	}
	for _, one := range []binding{
		{device.DriverName + "/" + attrParentUUID, gpu}, {string(device.AttrPCIBusID), gpu}, {string(device.AttrPCIeRoot), root},
	} {
		if one.of == "" {
			continue
		}
		if b.devices[one] == nil {
			b.order = append(b.order, one)
		}
		b.devices[one] = append(b.devices[one], d.Name)
	}
}

// shared returns the bindings of at least two devices. Karpenter ignores others.
func (b *bindings) shared() []AttributeBinding {
	var all []AttributeBinding
	for _, one := range b.order {
		if devices := b.devices[one]; len(devices) > 1 {
			all = append(all, AttributeBinding{resourceapi.FullyQualifiedName(one.attribute), devices})
		}
	}
	slices.SortStableFunc(all, func(x, y AttributeBinding) int { return strings.Compare(string(x.Attribute), string(y.Attribute)) })
	return all
}
