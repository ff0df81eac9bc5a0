package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Snapshot is the state of a cluster at one time.
type Snapshot struct {
	// Version is the API server's version, such as v1.36.3. Gates has those of its feature gates that
	// it shows in its metrics. It is empty if they could not be read.
	Version string
	Gates   map[string]bool
	Nodes   []*corev1.Node
	// Slices are the ResourceSlices of all drivers, with the taints of DeviceTaintRules.
	Slices     []*resourceapi.ResourceSlice
	Claims     []*resourceapi.ResourceClaim
	Classes    []*resourceapi.DeviceClass
	Templates  []*resourceapi.ResourceClaimTemplate
	Pods       []*corev1.Pod
	DaemonSets []*appsv1.DaemonSet
	// Configs are the configurations of this driver's plugins (config.yaml), by "namespace/name".
	Configs map[string]string
	// Settings are the plugins' settings files (settings.yaml), by the same names.
	Settings map[string]string
	// TaintRules are already part of Slices.
	TaintRules []*resourceapi.DeviceTaintRule
	// Missing has the kinds of objects that could not be read, each as "KIND: why".
	Missing []string
}

// Kind is a kind of objects, as messages name it.
type Kind string

// The kinds of objects that a [Snapshot] may lack.
const (
	Slices     Kind = "ResourceSlices"
	Claims     Kind = "ResourceClaims"
	Nodes      Kind = "Nodes"
	Classes    Kind = "DeviceClasses"
	Templates  Kind = "ResourceClaimTemplates"
	Pods       Kind = "Pods"
	TaintRules Kind = "DeviceTaintRules"
	DaemonSets Kind = "DaemonSets"
	Configs    Kind = "ConfigMaps of the driver"
)

// Lacks reports whether objects of this kind could not be read.
func (s *Snapshot) Lacks(kind Kind) bool { return s.Need(kind) != nil }

// Need returns an error if objects of one of these kinds could not be read. It is for answers that
// would be wrong without them.
func (s *Snapshot) Need(kinds ...Kind) error {
	for _, kind := range kinds {
		for _, what := range s.Missing {
			if strings.HasPrefix(what, string(kind)+": ") {
				return fmt.Errorf("the answer needs what could not be read: %s", what)
			}
		}
	}
	return nil
}

// Key is a claim's or Pod's name as users write it: "namespace/name".
func Key(o interface {
	GetNamespace() string
	GetName() string
}) string {
	return o.GetNamespace() + "/" + o.GetName()
}

// prepare sorts the objects and adds the taints of DeviceTaintRules to the slices.
func (s *Snapshot) prepare() {
	slices.SortFunc(s.Nodes, func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Claims, func(a, b *resourceapi.ResourceClaim) int { return strings.Compare(Key(a), Key(b)) })
	slices.SortFunc(s.Pods, func(a, b *corev1.Pod) int { return strings.Compare(Key(a), Key(b)) })
	slices.SortFunc(s.Slices, func(a, b *resourceapi.ResourceSlice) int {
		return cmp.Or(strings.Compare(a.Spec.Pool.Name, b.Spec.Pool.Name), strings.Compare(a.Name, b.Name))
	})
	for i, slice := range s.Slices {
		s.Slices[i] = withRules(slice, s.TaintRules)
	}
}

// withRules returns the slice with the taints of the rules, as the scheduler sees it.
func withRules(slice *resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule) *resourceapi.ResourceSlice {
	changed := slice
	for _, rule := range rules {
		selector := rule.Spec.DeviceSelector
		if selector == nil || ptr.Deref(selector.Driver, slice.Spec.Driver) != slice.Spec.Driver ||
			ptr.Deref(selector.Pool, slice.Spec.Pool.Name) != slice.Spec.Pool.Name {
			continue
		}
		for i, d := range slice.Spec.Devices {
			if ptr.Deref(selector.Device, d.Name) != d.Name {
				continue
			}
			if changed == slice {
				changed = slice.DeepCopy()
			}
			changed.Spec.Devices[i].Taints = append(changed.Spec.Devices[i].Taints, rule.Spec.Taint)
		}
	}
	return changed
}

// Pod returns the Pod with this namespace and name, or nil.
func (s *Snapshot) Pod(namespace, name string) *corev1.Pod {
	return find(s.Pods, namespace, name)
}

// Claim returns the claim with this namespace and name, or nil.
func (s *Snapshot) Claim(namespace, name string) *resourceapi.ResourceClaim {
	return find(s.Claims, namespace, name)
}

// Template returns the claim template with this namespace and name, or nil.
func (s *Snapshot) Template(namespace, name string) *resourceapi.ResourceClaimTemplate {
	return find(s.Templates, namespace, name)
}

// Node returns the node with this name, or nil.
func (s *Snapshot) Node(name string) *corev1.Node { return find(s.Nodes, "", name) }

// Class returns the DeviceClass with this name, or nil.
func (s *Snapshot) Class(name string) *resourceapi.DeviceClass { return find(s.Classes, "", name) }

func find[T interface {
	GetNamespace() string
	GetName() string
}](all []T, namespace, name string) (none T) {
	for _, o := range all {
		if o.GetNamespace() == namespace && o.GetName() == name {
			return o
		}
	}
	return none
}

// List returns every DeviceClass. With List and Get, a Snapshot is the allocator's list of classes.
func (s *Snapshot) List() ([]*resourceapi.DeviceClass, error) { return s.Classes, nil }

// Get returns the DeviceClass with this name.
func (s *Snapshot) Get(name string) (*resourceapi.DeviceClass, error) {
	if c := s.Class(name); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("DeviceClass %s does not exist", name)
}

// PodsOf returns the Pods that use the claim and have not ended. If Pods could not be read, it
// returns those for which the claim is reserved, with nothing but their names.
func (s *Snapshot) PodsOf(c *resourceapi.ResourceClaim) []*corev1.Pod {
	var users []*corev1.Pod
	if s.Lacks(Pods) {
		for _, r := range c.Status.ReservedFor {
			users = append(users, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: r.Name, UID: r.UID}})
		}
		return users
	}
	for _, p := range s.Pods {
		if p.Namespace != c.Namespace || Ended(p) {
			continue
		}
		for _, ref := range p.Spec.ResourceClaims {
			if name, _ := ClaimName(p, ref); name == c.Name {
				users = append(users, p)
				break
			}
		}
		if e := p.Status.ExtendedResourceClaimStatus; e != nil && e.ResourceClaimName == c.Name {
			users = append(users, p)
		}
	}
	return users
}

// Ended reports whether the Pod has ended and no longer uses its claims.
func Ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// ClaimName returns the name of the claim that the Pod's entry refers to. It is empty if the claim
// was not created yet. needed is false if the Pod needs no claim for this entry.
func ClaimName(p *corev1.Pod, ref corev1.PodResourceClaim) (name string, needed bool) {
	if ref.ResourceClaimName != nil {
		return *ref.ResourceClaimName, true
	}
	for _, status := range p.Status.ResourceClaimStatuses {
		if status.Name == ref.Name {
			return ptr.Deref(status.ResourceClaimName, ""), status.ResourceClaimName != nil
		}
	}
	return "", true
}

// DeviceID names a device in the cluster.
type DeviceID struct{ Driver, Pool, Device string }

// Holder is a claim that holds a device, or a share of it.
type Holder struct {
	Claim  *resourceapi.ResourceClaim
	Result resourceapi.DeviceRequestAllocationResult
}

// Holders returns the claims that hold each device. Claims with admin access hold nothing.
func (s *Snapshot) Holders() map[DeviceID][]Holder {
	all := map[DeviceID][]Holder{}
	for _, c := range s.Claims {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if !ptr.Deref(r.AdminAccess, false) {
				id := DeviceID{r.Driver, r.Pool, r.Device}
				all[id] = append(all[id], Holder{c, r})
			}
		}
	}
	return all
}

// SlicesOf returns the ResourceSlices of this driver on each node.
func (s *Snapshot) SlicesOf() map[string][]*resourceapi.ResourceSlice {
	all := map[string][]*resourceapi.ResourceSlice{}
	for _, slice := range s.Slices {
		if name := ptr.Deref(slice.Spec.NodeName, ""); name != "" && slice.Spec.Driver == device.DriverName {
			all[name] = append(all[name], slice)
		}
	}
	return all
}

// Newest returns the slices of the newest generation. All slices are of one pool.
func Newest(all []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	var newest []*resourceapi.ResourceSlice
	for _, slice := range all {
		switch {
		case len(newest) == 0 || slice.Spec.Pool.Generation > newest[0].Spec.Pool.Generation:
			newest = []*resourceapi.ResourceSlice{slice}
		case slice.Spec.Pool.Generation == newest[0].Spec.Pool.Generation:
			newest = append(newest, slice)
		}
	}
	return newest
}

// TaintText is a taint as users write it, such as gpu.nvidia.com/xid=79:NoSchedule.
func TaintText(t resourceapi.DeviceTaint) string {
	return strings.TrimSuffix(t.Key+"="+t.Value, "=") + ":" + string(t.Effect)
}

// UID returns the UID by which a claim is known in a snapshot. An archive without UIDs still works.
func UID(c *resourceapi.ResourceClaim) types.UID { return cmp.Or(c.UID, types.UID(Key(c))) }
