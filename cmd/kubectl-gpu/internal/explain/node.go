package explain

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingv1 "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
)

// question is what must fit on one node together.
type question struct {
	// pod is nil if only a claim is asked for.
	pod *corev1.Pod
	// open are the claims that have no allocation yet, allocated the Pod's other claims.
	open, allocated []*resourceapi.ResourceClaim
}

// nodeReasons returns what keeps the Pod from the node, apart from devices.
func (e *Explainer) nodeReasons(q question, node *corev1.Node) []Reason {
	var all []Reason
	for _, c := range q.allocated {
		selector := c.Status.Allocation.NodeSelector
		if selector == nil {
			continue
		}
		if s, err := nodeaffinity.NewNodeSelector(selector); err != nil || !s.Match(node) {
			all = append(all, Reason{Code: CodeOtherNode, Claims: []string{key(c)}, Sentence: sayOtherNode(c)})
		}
	}
	if q.pod == nil {
		if node.Spec.Unschedulable {
			all = append(all, Reason{Code: CodeCordoned, Sentence: sayCordoned(node.Name)})
		}
		return all
	}
	spec := &q.pod.Spec
	tolerates := schedulingv1.TolerationsTolerateTaint(klog.Background(), spec.Tolerations, &corev1.Taint{
		Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule,
	}, true)
	if node.Spec.Unschedulable && !tolerates {
		all = append(all, Reason{Code: CodeCordoned, Sentence: sayCordoned(node.Name)})
	}
	var taints []string
	for i, t := range node.Spec.Taints {
		if t.Key == corev1.TaintNodeUnschedulable || t.Effect == corev1.TaintEffectPreferNoSchedule ||
			schedulingv1.TolerationsTolerateTaint(klog.Background(), spec.Tolerations, &node.Spec.Taints[i], true) {
			continue
		}
		taints = append(taints, t.ToString())
	}
	if len(taints) > 0 {
		all = append(all, Reason{Code: CodeNodeTaint, Sentence: sayNodeTaint(taints)})
	}
	var wrong []string
	for name, want := range spec.NodeSelector {
		if got, has := node.Labels[name]; !has || got != want {
			wrong = append(wrong, name+"="+want)
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		all = append(all, Reason{Code: CodeNodeSelector, Sentence: sayNodeSelector(wrong)})
	}
	affinityOnly := &corev1.Pod{Spec: corev1.PodSpec{Affinity: spec.Affinity}}
	if ok, err := nodeaffinity.GetRequiredNodeAffinity(affinityOnly).Match(node); err != nil || !ok {
		all = append(all, Reason{Code: CodeNodeAffinity, Sentence: sayNodeAffinity()})
	}
	for name, want := range podRequests(q.pod) {
		have, known := node.Status.Allocatable[name]
		// Devices of a class replace a device plugin's resource. The scheduler does not count others
		// without a domain, such as pods, on a node that does not report them.
		device := e.s.On(fleet.GateExtendedResource) && e.extended.GetDeviceClass(name) != nil
		if device && have.IsZero() || !known && !strings.Contains(string(name), "/") {
			continue
		}
		free := have.DeepCopy()
		if u, some := e.used[node.Name][name]; some {
			free.Sub(u)
		}
		if want.Cmp(free) > 0 {
			all = append(all, Reason{Code: "node-" + string(name), Sentence: sayNodeResource(string(name), want, free)})
		}
	}
	slices.SortFunc(all, func(a, b Reason) int { return strings.Compare(a.Code, b.Code) })
	return all
}

// claimsOf returns the question that the Pod is, and what already blocks the Pod on all nodes.
func (e *Explainer) claimsOf(p *corev1.Pod) (question, []Reason) {
	q := question{pod: p}
	var blocked []Reason
	if len(p.Spec.SchedulingGates) > 0 {
		var gates []string
		for _, g := range p.Spec.SchedulingGates {
			gates = append(gates, g.Name)
		}
		blocked = append(blocked, Reason{Code: CodeGated, Sentence: sayGated(gates)})
	}
	for _, ref := range p.Spec.ResourceClaims {
		name, needed := fleet.ClaimName(p, ref)
		if !needed {
			continue
		}
		template := ptr.Deref(ref.ResourceClaimTemplateName, "")
		claim := e.s.Claim(p.Namespace, name)
		switch {
		case name == "" && e.s.Template(p.Namespace, template) == nil && !e.s.Lacks(fleet.Templates):
			blocked = append(blocked, Reason{Code: CodeNoTemplate, Sentence: sayNoTemplate(p.Namespace, template)})
		case name == "":
			blocked = append(blocked, Reason{Code: CodeClaimNotCreated, Sentence: sayClaimNotCreated(ref.Name, template)})
		case claim == nil:
			blocked = append(blocked, Reason{Code: CodeNoClaim, Sentence: sayNoClaim(p.Namespace, name)})
		case claim.DeletionTimestamp != nil:
			blocked = append(blocked, Reason{Code: CodeClaimDeleted, Claims: []string{key(claim)}, Sentence: sayClaimDeleted(claim)})
		case claim.Status.Allocation == nil:
			q.open = append(q.open, claim)
		default:
			q.allocated = append(q.allocated, claim)
			if full := len(claim.Status.ReservedFor) >= resourceapi.ResourceClaimReservedForMaxSize; full && !reservedFor(claim, p) {
				blocked = append(blocked, Reason{Code: CodeClaimFull, Claims: []string{key(claim)}, Sentence: sayClaimFull(claim)})
			}
		}
	}
	if c := e.extendedClaim(p); c != nil {
		q.open = append(q.open, c)
	}
	return q, append(blocked, e.blockedClaims(q.open)...)
}

// blockedClaims returns what keeps the claims from being allocated on any node.
func (e *Explainer) blockedClaims(open []*resourceapi.ResourceClaim) []Reason {
	var blocked []Reason
	for _, c := range open {
		requests, err := requestsOf(c)
		if err != nil {
			blocked = append(blocked, Reason{Code: CodeError, Claims: []string{key(c)}, Sentence: err.Error()})
		}
		for _, r := range requests {
			f := r.fields()
			if e.s.Class(*f.class) == nil {
				blocked = append(blocked, Reason{Code: CodeNoClass, Request: r.name(), Claims: []string{key(c)}, Sentence: sayNoClass(*f.class)})
			}
			var missing string
			switch {
			case f.adminAccess && !e.features.AdminAccess:
				missing = "DRAAdminAccess"
			case r.sub != nil && !e.features.PrioritizedList:
				missing = "DRAPrioritizedList"
			case *f.capacity != nil && !e.features.ConsumableCapacity:
				missing = "DRAConsumableCapacity"
			}
			if missing != "" {
				blocked = append(blocked, Reason{Code: CodeFeatureOff, Request: r.name(), Claims: []string{key(c)},
					Sentence: sayFeatureOff(r.name(), missing)})
			}
		}
	}
	return blocked
}

func reservedFor(c *resourceapi.ResourceClaim, p *corev1.Pod) bool {
	return slices.ContainsFunc(c.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == p.UID })
}

// extendedUID is the UID of the claim that extendedClaim makes.
const extendedUID = "extended-resources"

// extendedClaim returns the claim that the scheduler would create for the Pod's extended resources,
// such as nvidia.com/gpu. Each request has the name of its resource. It returns nil if the Pod has
// none that a DeviceClass offers.
// https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#extended-resource
func (e *Explainer) extendedClaim(p *corev1.Pod) *resourceapi.ResourceClaim {
	if p.Status.ExtendedResourceClaimStatus != nil || !e.s.On(fleet.GateExtendedResource) {
		return nil
	}
	claim := &resourceapi.ResourceClaim{}
	claim.Namespace, claim.Name, claim.UID = p.Namespace, p.Name+"-extended-resources", extendedUID
	requests := podRequests(p)
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		q := requests[name]
		if class := e.extended.GetDeviceClass(name); class != nil && !q.IsZero() {
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
				Name: string(name),
				Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: class.Name, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: q.Value(),
				},
			})
		}
	}
	if len(claim.Spec.Devices.Requests) == 0 {
		return nil
	}
	return claim
}

// withoutDevicePlugin returns the claims for a node without those extended resources that a device
// plugin offers there. The scheduler takes them from the device plugin.
func withoutDevicePlugin(all []*resourceapi.ResourceClaim, node *corev1.Node) []*resourceapi.ResourceClaim {
	var kept []*resourceapi.ResourceClaim
	for _, c := range all {
		if c.UID == extendedUID {
			c = c.DeepCopy()
			c.Spec.Devices.Requests = slices.DeleteFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
				q := node.Status.Allocatable[corev1.ResourceName(r.Name)]
				return !q.IsZero()
			})
			if len(c.Spec.Devices.Requests) == 0 {
				continue
			}
		}
		kept = append(kept, c)
	}
	return kept
}
