package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
)

// Codes of reasons. Programs read the code, people the sentence.
const (
	CodeGated           = "scheduling-gate"
	CodeNoTemplate      = "no-template"
	CodeClaimNotCreated = "claim-not-created"
	CodeNoClaim         = "no-claim"
	CodeClaimDeleted    = "claim-deleted"
	CodeClaimFull       = "claim-full"
	CodeNoClass         = "no-class"
	CodeFeatureOff      = "feature-off"
	CodeError           = "error"
	CodeSelectorError   = "selector-error"
	CodeGaveUp          = "gave-up"
	CodeBypassed        = "scheduler-bypassed"
	CodeNotReserved     = "not-reserved"

	CodeCordoned     = "cordoned"
	CodeNodeTaint    = "node-taint"
	CodeNodeSelector = "node-selector"
	CodeNodeAffinity = "node-affinity"
	CodeOtherNode    = "other-node"

	CodeNoSlices   = "no-slices"
	CodeIncomplete = "pool-incomplete"
	CodeSelector   = "selector"
	CodeTaken      = "taken"
	CodeCounters   = "counters"
	CodeCapacity   = "capacity"
	CodeTaint      = "taint"
	CodeCount      = "count"
	CodeAll        = "all"
	CodeTooMany    = "too-many"
	CodeConstraint = "constraint"
	CodeTogether   = "together"
)

// opens has the reasons that a change of the node or of the Pod's specification removes.
var opens = map[string]bool{CodeCordoned: true, CodeNodeTaint: true, CodeNodeSelector: true, CodeNodeAffinity: true}

// The rest of this file has every sentence that this package says.

// some lists a few names and counts the others.
func some(names []string) string {
	const shown = 4
	if len(names) > shown+1 {
		return fmt.Sprintf("%s and %d others", strings.Join(names[:shown], ", "), len(names)-shown)
	}
	return strings.Join(names, ", ")
}

func count(n int, one string) string {
	switch {
	case n == 1:
		return "1 " + one
	case strings.HasSuffix(one, "class"):
		return fmt.Sprintf("%d %ses", n, one)
	default:
		return fmt.Sprintf("%d %ss", n, one)
	}
}

func sayEnded(subject, phase string) string {
	return fmt.Sprintf("%s has ended (%s) and needs no devices.", subject, phase)
}

func sayNoClaims(subject string) string {
	return subject + " uses no claim and no extended resource of a DeviceClass, so devices do not hold it up."
}

func sayScheduled(subject, node, phase string) string {
	return fmt.Sprintf("%s is on node %s (%s).", subject, node, phase)
}

func sayBypassed(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("Claim %s has no devices, but its Pod already has a node: "+
		"spec.nodeName bypassed the scheduler, which allocates claims. "+
		"Delete the Pod and create it without nodeName.", key(c))
}

func sayNotReserved(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("Claim %s is not reserved for the Pod, so the kubelet does not start it.", key(c))
}

func sayGated(gates []string) string {
	return fmt.Sprintf("The Pod has %s (%s). The controller that set it must remove it before the scheduler looks at the Pod.",
		count(len(gates), "scheduling gate"), some(gates))
}

func sayNoTemplate(namespace, name string) string {
	return fmt.Sprintf("ResourceClaimTemplate %s/%s does not exist. Create it.", namespace, name)
}

func sayClaimNotCreated(ref, template string) string {
	return fmt.Sprintf("The claim for %s is not created yet from template %s. kube-controller-manager creates it: see the Pod's events.",
		ref, template)
}

func sayNoClaim(namespace, name string) string {
	return fmt.Sprintf("ResourceClaim %s/%s does not exist. Create it.", namespace, name)
}

func sayClaimDeleted(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("Claim %s is being deleted. It goes when the last Pod that uses it has ended.", key(c))
}

func sayClaimFull(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("Claim %s is reserved for %d Pods, and more are not possible.", key(c), len(c.Status.ReservedFor))
}

func sayNoClass(name string) string { return fmt.Sprintf("DeviceClass %s does not exist.", name) }

func sayFeatureOff(request, gate string) string {
	return fmt.Sprintf("Request %s needs the feature gate %s, which this cluster does not have.", request, gate)
}

func sayBlocked(subject string, reasons []Reason) string {
	return fmt.Sprintf("%s cannot be scheduled on any node: %s", subject, reasons[0].Sentence)
}

func sayFits(subject string, nodes []string) string {
	return fmt.Sprintf("%s fits on %s (%s). The scheduler has not placed it yet.", subject, count(len(nodes), "node"), some(nodes))
}

func sayWaits(subject string, nodes []Node) string {
	if len(nodes) == 1 {
		return fmt.Sprintf("%s does not fit on the only node.", subject)
	}
	return fmt.Sprintf("%s fits on none of the %s.", subject, count(len(nodes), "node"))
}

func sayNoNodes(subject string) string { return subject + " waits: the cluster has no nodes." }

func sayAllocated(c *resourceapi.ResourceClaim, users []string) string {
	n := count(len(c.Status.Allocation.Devices.Results), "device")
	if len(users) == 0 {
		return fmt.Sprintf("Claim %s has %s, but no Pod uses it. Deleting the claim frees them.", key(c), n)
	}
	return fmt.Sprintf("Claim %s has %s, for %s.", key(c), n, some(users))
}

func sayUnused(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("No Pod uses claim %s. A claim gets devices only when a Pod needs it.", key(c))
}

func sayWithPod(users []string) string {
	if len(users) == 1 {
		return fmt.Sprintf("Pod %s waits with this claim, and its node selectors and other claims count too.", users[0])
	}
	return fmt.Sprintf("%d Pods wait with this claim. This report is about %s.", len(users), users[0])
}

func sayOtherNode(c *resourceapi.ResourceClaim) string {
	where := c.Status.Allocation.Devices.Results
	if len(where) == 0 {
		return fmt.Sprintf("claim %s is allocated on another node", key(c))
	}
	return fmt.Sprintf("claim %s already has devices of %s", key(c), where[0].Pool)
}

func sayCordoned(string) string { return "the node is cordoned" }

func sayNodeTaint(taints []string) string {
	return fmt.Sprintf("the Pod does not tolerate the node's %s %s", plural(len(taints), "taint"), some(taints))
}

func sayNodeSelector(wrong []string) string {
	return fmt.Sprintf("the node lacks the %s %s of the Pod's node selector", plural(len(wrong), "label"), some(wrong))
}

func sayNodeAffinity() string { return "the Pod's node affinity excludes the node" }

func sayNodeResource(name string, want, free resource.Quantity) string {
	if name == string(corev1.ResourcePods) {
		return "the node has as many Pods as it may have"
	}
	return fmt.Sprintf("the Pod requests %s of %s, and %s is left", want.String(), name, free.String())
}

func plural(n int, one string) string {
	if n == 1 {
		return one
	}
	return one + "s"
}

func sayOpen(code, node string) string {
	switch code {
	case CodeCordoned:
		return "kubectl uncordon " + node
	case CodeNodeTaint:
		return fmt.Sprintf("tolerate the taints of node %s", node)
	case CodeNodeSelector:
		return fmt.Sprintf("let the Pod's node selector allow node %s", node)
	default:
		return fmt.Sprintf("let the Pod's node affinity allow node %s", node)
	}
}

func sayNoSlices() string { return "no driver publishes devices for this node" }

func sayIncomplete(p pool, have, want int64) string {
	return fmt.Sprintf("pool %s of %s is being updated: %d of its %s are there", p.name, p.driver, have, count(int(want), "slice"))
}

func saySelector(n, total int, f fate) string {
	of := "the request"
	if f.class != "" {
		of = "class " + f.class
	}
	return fmt.Sprintf("%d of %s %s not match a selector of %s: %s", n, count(total, "device"), does(n), of, f.selector)
}

func does(n int) string {
	if n == 1 {
		return "does"
	}
	return "do"
}

func saySelectorError(f fate) string {
	of := "the request"
	if f.class != "" {
		of = "class " + f.class
	}
	return fmt.Sprintf("A selector of %s fails on device %s of %s, which stops scheduling on all nodes: %s (%v)",
		of, f.device.Name, f.pool.id.name, f.selector, firstLine(f.failure))
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// matching is the subject of a sentence about devices that match the request.
func matching(n, all int) string {
	if n == all {
		if n == 1 {
			return "the only matching device"
		}
		return fmt.Sprintf("all %d matching devices", n)
	}
	return fmt.Sprintf("%d of %d matching devices", n, all)
}

func verb(n, all int, one, many string) string {
	if n == 1 && (all == 1 || n < all) {
		return one
	}
	return many
}

func sayTaken(n, all int, claims []string) string {
	return fmt.Sprintf("%s %s allocated to %s", matching(n, all), verb(n, all, "is", "are"), some(claims))
}

func sayCounters(n, all int, counters, claims []string) string {
	if len(claims) == 0 {
		return fmt.Sprintf("%s %s more than the GPU has (%s)", matching(n, all), verb(n, all, "needs", "need"), ranges(counters))
	}
	return fmt.Sprintf("%s %s what %s %s (%s)",
		matching(n, all), verb(n, all, "needs", "need"), some(claims), verb(len(claims), 2, "holds", "hold"), ranges(counters))
}

// ranges writes consecutive counters as a range: "memory-slice-0 to 3".
func ranges(counters []string) string {
	var out []string
	numbers := map[string][]int{}
	for _, c := range counters {
		i := strings.LastIndex(c, "-")
		n, err := strconv.Atoi(c[i+1:])
		if i < 0 || err != nil {
			out = append(out, c)
			continue
		}
		numbers[c[:i]] = append(numbers[c[:i]], n)
	}
	for _, prefix := range slices.Sorted(maps.Keys(numbers)) {
		all := numbers[prefix]
		slices.Sort(all)
		for i := 0; i < len(all); {
			j := i
			for j+1 < len(all) && all[j+1] == all[j]+1 {
				j++
			}
			if i == j {
				out = append(out, fmt.Sprintf("%s-%d", prefix, all[i]))
			} else {
				out = append(out, fmt.Sprintf("%s-%d to %d", prefix, all[i], all[j]))
			}
			i = j + 1
		}
	}
	return strings.Join(out, ", ")
}

func sayCapacity(n, all int, devices []fate, claims []string) string {
	most := devices[0]
	for _, f := range devices {
		if f.left.Cmp(most.left) > 0 {
			most = f
		}
	}
	s := fmt.Sprintf("%s %s too little %s: the request asks for %s, and at most %s is left",
		matching(n, all), verb(n, all, "has", "have"), most.capacity, most.wanted.String(), most.left.String())
	if len(claims) > 0 {
		s += fmt.Sprintf(". %s %s the rest", some(claims), verb(len(claims), 2, "holds", "hold"))
	}
	return s
}

func sayTaint(n, all int, taint string) string {
	return fmt.Sprintf("%s %s the taint %s, which the request does not tolerate", matching(n, all), verb(n, all, "has", "have"), taint)
}

func sayDeviceGate(n, all int, gate string) string {
	return fmt.Sprintf("%s %s the feature gate %s, which this cluster does not have", matching(n, all), verb(n, all, "needs", "need"), gate)
}

func sayCount(need, free, all int) string {
	return fmt.Sprintf("the request needs %s, and %d of the %d that match %s free",
		count(need, "device"), free, all, verb(free, 2, "is", "are"))
}

func sayAll(free, all int) string {
	return fmt.Sprintf("the request asks for all %s, and %d %s free", count(all, "matching device"), free, verb(free, 2, "is", "are"))
}

func sayTooMany(need int) string {
	return fmt.Sprintf("the request needs %d devices, and a claim can have %d", need, resourceapi.AllocationResultsMaxSize)
}

func sayConstraint(c resourceapi.DeviceConstraint, groups map[string]int) string {
	var parts []string
	for _, value := range slices.Sorted(maps.Keys(groups)) {
		parts = append(parts, fmt.Sprintf("%s: %d", value, groups[value]))
	}
	return fmt.Sprintf("%s excludes every choice of devices. Free devices by value: %s", constraintText(c), some(parts))
}

func constraintText(c resourceapi.DeviceConstraint) string {
	switch {
	case c.MatchAttribute != nil:
		return fmt.Sprintf("the constraint that %s is equal", *c.MatchAttribute)
	case c.DistinctAttribute != nil:
		return fmt.Sprintf("the constraint that %s is different", *c.DistinctAttribute)
	default:
		return "a constraint"
	}
}

func sayTogether() string {
	return "each request alone has enough free devices, but together they need more than the GPUs have"
}

func sayGaveUp() string {
	return fmt.Sprintf("the allocator found no answer within %s. The scheduler gives up after 10s: make the claim simpler", patience)
}

func sayFree(c *resourceapi.ResourceClaim, users []string) string {
	if len(users) == 0 {
		return fmt.Sprintf("delete claim %s, which no Pod uses", key(c))
	}
	return fmt.Sprintf("delete %s, which %s claim %s", some(users), verb(len(users), 2, "has", "have"), key(c))
}

func sayTolerate(request string, t resourceapi.DeviceTaint) string {
	return fmt.Sprintf("tolerate the taint %s in request %s", fleet.TaintText(t), request)
}

func sayRepair(node string, t resourceapi.DeviceTaint) string {
	return fmt.Sprintf("make node %s ready again (%s): kubectl gpu doctor says how", node, t.Value)
}

func sayAskLess(request string, n int64, need int) string {
	return fmt.Sprintf("ask for %d instead of %s in request %s", n, count(need, "device"), request)
}

func sayAskCapacity(request, capacity string, left, wanted resource.Quantity) string {
	return fmt.Sprintf("ask for %s instead of %s of %s in request %s", left.String(), wanted.String(), capacity, request)
}

func sayAskOther(request, other, now, class string) string {
	return fmt.Sprintf("ask for %s instead of %s in request %s (class %s)", other, now, request, class)
}

func sayDropSelector(request, selector string) string {
	return fmt.Sprintf("remove the selector %s from request %s", selector, request)
}

func sayDropConstraint(c resourceapi.DeviceConstraint) string { return "remove " + constraintText(c) }

func sayAsked(r request) string {
	f := r.fields()
	what := fmt.Sprintf("%s of class %s", count(int(*f.count), "device"), *f.class)
	if *f.mode == resourceapi.DeviceAllocationModeAll {
		what = "all devices of class " + *f.class
	}
	var selectors []string
	for _, s := range *f.selectors {
		if s.CEL != nil {
			selectors = append(selectors, s.CEL.Expression)
		}
	}
	if len(selectors) > 0 {
		what += " with " + strings.Join(selectors, " and ")
	}
	if *f.capacity != nil {
		what += ", " + shareText((*f.capacity).Requests)
	}
	if f.adminAccess {
		what += ", with admin access"
	}
	return what
}

func shareText(all map[resourceapi.QualifiedName]resource.Quantity) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		q := all[name]
		parts = append(parts, fmt.Sprintf("%s %s", name, q.String()))
	}
	return strings.Join(parts, ", ")
}

func attributeText(a resourceapi.DeviceAttribute) string {
	switch {
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	case a.BoolValue != nil:
		return fmt.Sprint(*a.BoolValue)
	default:
		return cmp.Or(ptr.Deref(a.StringValue, ""), ptr.Deref(a.VersionValue, ""))
	}
}

// shapeName returns how people call a device of this type and profile.
func shapeName(kind, profile string) string {
	switch kind {
	case "gpu":
		return "a whole GPU"
	case "gpu-share":
		return "a share of a GPU"
	case "mig":
		return cmp.Or(profile, "a partition")
	case "mig-share":
		return "a share of " + cmp.Or(profile, "a partition")
	case "vfio":
		return "a whole GPU for a virtual machine"
	case "":
		return "a device with an unknown name"
	default:
		return "a device of type " + kind
	}
}
