// Package fleettest builds clusters of API objects for tests of kubectl-gpu: nodes with the slices
// that the plugin publishes for real GPU models, classes as the chart makes them, claims and Pods.
package fleettest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/models"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

// Keys of GPU models.
const (
	H100 = "h100-sxm5-80gb"
	A30  = "a30-24gb"
	L40S = "l40s-48gb"
)

// Namespace is the namespace of all claims and Pods.
const Namespace = "team-a"

// Cluster is a cluster under construction.
type Cluster struct {
	Nodes     []*corev1.Node
	Slices    []*resourceapi.ResourceSlice
	Claims    []*resourceapi.ResourceClaim
	Classes   []*resourceapi.DeviceClass
	Pods      []*corev1.Pod
	Templates []*resourceapi.ResourceClaimTemplate
	Rules     []*resourceapi.DeviceTaintRule

	shares int
}

// New returns a cluster with the chart's classes.
func New() *Cluster {
	c := &Cluster{}
	c.Class("gpu.nvidia.com", IsType("gpu")).Spec.ExtendedResourceName = ptr.To("nvidia.com/gpu")
	c.Class("mig.nvidia.com", IsType("mig"))
	c.Class("shared.gpu.nvidia.com", "device.attributes['gpu.nvidia.com'].type in ['gpu-share', 'mig-share']")
	return c
}

// IsType is the selector for a type of device.
func IsType(t string) string {
	return fmt.Sprintf("device.attributes['gpu.nvidia.com'].type == '%s'", t)
}

// IsProfile is the selector for a MIG profile.
func IsProfile(p string) string {
	return fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", p)
}

// Class adds a class with these selectors.
func (c *Cluster) Class(name string, selectors ...string) *resourceapi.DeviceClass {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, s := range selectors {
		class.Spec.Selectors = append(class.Spec.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	c.Classes = append(c.Classes, class)
	return class
}

// known has the models that were read.
var known sync.Map

func read(key string) (*model.GPU, error) {
	if m, ok := known.Load(key); ok {
		return m.(*model.GPU), nil
	}
	m, err := models.Read(key)
	if err == nil {
		known.Store(key, m)
	}
	return m, err
}

// GPU returns the i-th GPU of a node, as a scan would.
func GPU(key, node string, i int) (device.GPU, error) {
	m, err := read(key)
	if err != nil {
		return device.GPU{}, err
	}
	g := device.GPU{
		PCIAddress: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+i)), UUID: fmt.Sprintf("GPU-%s-%d", node, i),
		ProductName: m.ProductName.Value, Architecture: m.Architecture.Value, Brand: m.Brand.Value,
		MemoryBytes: m.MemoryTotalMiB.Value << 20, PCIeRoot: fmt.Sprintf("pci0000:%02x", i/2), NUMANode: ptr.To(i / 4),
	}
	if m.MIG.Supported.Value {
		g.MIG = &device.MIG{}
	}
	for _, p := range m.MIG.Profiles {
		g.MIG.Profiles = append(g.MIG.Profiles, device.Profile{
			ID: p.ID, Name: strings.TrimPrefix(p.Name, "MIG "), Slices: p.Slices, MaxInstances: p.InstancesMax,
			MemoryBytes: p.MemoryMiB << 20, Size: p.Placements.Size, Starts: p.Placements.Starts,
			Engines: device.Engines{
				Multiprocessors: p.SM, CopyEngines: p.CopyEngines, Decoders: p.Decoders,
				JPEGEngines: p.JPEGEngines, OFAEngines: p.OFAEngines,
			},
		})
	}
	if g.MIG != nil {
		slices.SortFunc(g.MIG.Profiles, func(a, b device.Profile) int { return cmp.Compare(a.ID, b.ID) })
	}
	return g, nil
}

// Node adds a node with n GPUs of a model, and the slices that its plugin publishes under these
// policies and shares.
func (c *Cluster) Node(name, key string, n int, policies, shares string) *corev1.Node {
	rules, err := settings.ParseMIG(policies)
	must(err)
	share, err := settingstest.Shares(shares)
	must(err)
	var offerings []device.Offering
	for i := range n {
		g, err := GPU(key, name, i)
		must(err)
		layout, _ := device.Decide(g, nil, rules.For(g), true)
		offerings = append(offerings, device.Offering{GPU: g, Layout: layout, Shares: share})
	}
	published := device.Slices(device.Offer(offerings), device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false)
	for i, p := range published {
		c.Slices = append(c.Slices, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: device.DriverName, NodeName: ptr.To(name), Devices: p.Devices, SharedCounters: p.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(published))},
			},
		})
	}
	return c.PlainNode(name)
}

// PlainNode adds a node without devices.
func (c *Cluster) PlainNode(name string) *corev1.Node {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("512Gi"),
		}},
	}
	c.Nodes = append(c.Nodes, node)
	return node
}

// Taint adds a taint to a device. The value of the taint is value.
func (c *Cluster) Taint(node, name, taint, value string, effect resourceapi.DeviceTaintEffect) {
	for _, s := range c.Slices {
		for i := range s.Spec.Devices {
			if d := &s.Spec.Devices[i]; s.Spec.Pool.Name == node && (d.Name == name || name == "") {
				d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: taint, Value: value, Effect: effect})
			}
		}
	}
}

// Request returns a request for n devices of a class with these selectors.
func Request(name, class string, n int64, selectors ...string) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n,
	}}
	for _, s := range selectors {
		r.Exactly.Selectors = append(r.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	return r
}

// Alternative returns one alternative of a prioritized list.
func Alternative(name, class string, n int64, selectors ...string) resourceapi.DeviceSubRequest {
	r := Request(name, class, n, selectors...)
	return resourceapi.DeviceSubRequest{
		Name: name, DeviceClassName: class, AllocationMode: r.Exactly.AllocationMode, Count: n, Selectors: r.Exactly.Selectors,
	}
}

// Claim adds a claim with these requests.
func (c *Cluster) Claim(name string, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name, UID: types.UID("uid-" + name)},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}},
	}
	c.Claims = append(c.Claims, claim)
	return claim
}

// Held adds a claim that has these devices of a node, and a Pod that uses it.
func (c *Cluster) Held(name, node string, devices ...string) *resourceapi.ResourceClaim {
	claim := c.Claim(name, Request("gpu", "gpu.nvidia.com", int64(len(devices))))
	a := &resourceapi.AllocationResult{NodeSelector: OnNode(node)}
	for _, d := range devices {
		a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu", Driver: device.DriverName, Pool: node, Device: d,
		})
	}
	claim.Status.Allocation = a
	p := c.Pod(name+"-pod", name)
	p.Spec.NodeName, p.Status.Phase, p.UID = node, corev1.PodRunning, types.UID(name+"-pod")
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: p.Name, UID: p.UID}}
	return claim
}

// HeldShare adds a claim that has a share of a device, with these capacities ("memory=10Gi").
func (c *Cluster) HeldShare(name, node, shared string, capacities ...string) *resourceapi.ResourceClaim {
	claim := c.Held(name, node, shared)
	r := &claim.Status.Allocation.Devices.Results[0]
	c.shares++
	r.ShareID = ptr.To(types.UID(fmt.Sprintf("share-%d", c.shares)))
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
	for _, text := range capacities {
		name, amount, _ := strings.Cut(text, "=")
		r.ConsumedCapacity[resourceapi.QualifiedName(name)] = resource.MustParse(amount)
	}
	return claim
}

// OnNode is the node selector of an allocation on one node.
func OnNode(node string) *corev1.NodeSelector {
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
		Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node},
	}}}}}
}

// Pod adds a pending Pod that uses these claims.
func (c *Cluster) Pod(name string, claims ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name, UID: types.UID("pod-" + name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, claim := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)})
	}
	c.Pods = append(c.Pods, p)
	return p
}

// Device returns the name of the i-th GPU's device. With a profile ID it is a placement.
func Device(i int, placement ...uint32) string {
	n := device.Name{GPU: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+i)).WholeName()}
	if len(placement) == 2 {
		n.Partition = &device.PartitionName{ProfileID: placement[0], Start: placement[1]}
	}
	return n.String()
}

// Objects returns all objects for a fake API server.
func (c *Cluster) Objects() []runtime.Object {
	var all []runtime.Object
	for _, o := range c.Nodes {
		all = append(all, o)
	}
	for _, o := range c.Slices {
		all = append(all, o)
	}
	for _, o := range c.Claims {
		all = append(all, o)
	}
	for _, o := range c.Classes {
		all = append(all, o)
	}
	for _, o := range c.Pods {
		all = append(all, o)
	}
	for _, o := range c.Templates {
		all = append(all, o)
	}
	for _, o := range c.Rules {
		all = append(all, o)
	}
	return all
}

// must panics if a test names a model, policy or share that does not exist.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
