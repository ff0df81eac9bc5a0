package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// wish is a claim that a test creates, and the allocations that the test accepts for it.
type wish struct {
	node    string // empty: any
	devices string // the YAML of spec.devices
	count   int
	// among are the devices from which the scheduler may allocate, each written as node/device.
	among []string
	// same is an attribute that must have one value for all allocated devices. distinct is an
	// attribute whose value must differ between them.
	same, distinct resourceapi.QualifiedName
	request        string // the request name in the allocation results; empty: any
}

// gpus returns a claim for count GPUs that satisfy all these CEL expressions.
func gpus(count int, expressions ...string) string {
	var selectors []string
	for _, e := range expressions {
		selectors = append(selectors, fmt.Sprintf("{cel: {expression: %q}}", e))
	}
	return fmt.Sprintf(
		"requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: %d, selectors: [%s]}}]",
		count,
		strings.Join(selectors, ", "),
	)
}

// names returns the GPUs with these PCI bus numbers as node/device.
func names(node string, buses ...string) []string {
	var all []string
	for _, bus := range buses {
		all = append(all, node+"/gpu-0000-"+bus+"-00-0")
	}
	return all
}

// Short names for the CEL expressions and attributes of the tests.
const (
	product    = `device.attributes["gpu.nvidia.com"].productName`
	memory     = `device.capacity["gpu.nvidia.com"].memory`
	numa       = `device.attributes["resource.kubernetes.io"].numaNode`
	pcieRoot   = resourceapi.QualifiedName("resource.kubernetes.io/pcieRoot")
	numaNode   = resourceapi.QualifiedName("resource.kubernetes.io/numaNode")
	constraint = "\nconstraints: [{requests: [gpus], %s: %s}]"
)

func match(a resourceapi.QualifiedName) string { return fmt.Sprintf(constraint, "matchAttribute", a) }
func distinct(a resourceapi.QualifiedName) string {
	return fmt.Sprintf(constraint, "distinctAttribute", a)
}

// ask creates, for each wish, a claim template and a Pod that uses it.
func (u tenant) ask(wishes map[string]wish) {
	u.t.Helper()
	for name, wish := range wishes {
		u.template(name, wish.devices)
		parts := []func(*corev1.Pod){fromTemplate("gpus", name)}
		if wish.node != "" {
			parts = append(parts, onNode(wish.node))
		}
		u.pod(name, parts...)
	}
}

// grant creates a Pod for each wish. It fails the test unless the scheduler allocates devices that
// the wish accepts, and the Pod sees exactly these GPUs.
func (u tenant) grant(wishes map[string]wish) {
	u.t.Helper()
	u.ask(wishes)
	for name, wish := range wishes {
		u.running(name)
		u.check(name, wish)
		if u.sim.SMI != "" {
			u.sees(name, "", u.allocated(name, "gpus"))
		}
	}
}

func (u tenant) check(name string, wish wish) {
	u.t.Helper()
	results := u.claimOf(u.t, u.namespace, name, "gpus").Status.Allocation.Devices.Results
	if len(results) != wish.count {
		u.t.Errorf("claim %s was allocated %d devices, want %d: %v", name, len(results), wish.count, results)
	}
	values := map[resourceapi.QualifiedName]sets.Set[string]{wish.same: {}, wish.distinct: {}}
	for _, r := range results {
		if !slices.Contains(wish.among, r.Pool+"/"+r.Device) {
			u.t.Errorf("claim %s was allocated %s/%s, want %v", name, r.Pool, r.Device, wish.among)
		}
		if wish.request != "" && r.Request != wish.request {
			u.t.Errorf("claim %s was allocated for request %s, want %s", name, r.Request, wish.request)
		}
		for attribute, set := range values {
			if a, ok := u.devices(u.t, r.Pool)[r.Device].Attributes[attribute]; ok {
				set.Insert(a.String())
			}
		}
	}
	if wish.same != "" && values[wish.same].Len() != 1 {
		u.t.Errorf("claim %s: %s has the values %v, want one", name, wish.same, values[wish.same])
	}
	if wish.distinct != "" && values[wish.distinct].Len() != wish.count {
		u.t.Errorf("claim %s: %s has the values %v, want one a device", name, wish.distinct, values[wish.distinct])
	}
}

// refuse creates a Pod for each wish, and waits until the scheduler reports that no node has the
// devices for it.
func (u tenant) refuse(wishes map[string]wish) {
	u.t.Helper()
	u.ask(wishes)
	for name := range wishes {
		u.waits(name)
	}
}

var (
	lowerH100 = names(h100, "1b", "43", "52", "61") // of NUMA node 0
	upperH100 = names(h100, "9d", "c3", "d1", "df") // of NUMA node 1
	allH100   = slices.Concat(lowerH100, upperH100)
	allA100   = names(a100, "07", "0f", "47", "4e", "87", "90", "b7", "bd")
)

func (w *world) testSelectors(t *testing.T) {
	u := w.tenant(t)
	chosen := *w.devices(t, h100)["gpu-0000-52-00-0"].Attributes["uuid"].StringValue
	u.grant(map[string]wish{
		"uuid":         {devices: gpus(1, `device.attributes["gpu.nvidia.com"].uuid == "`+chosen+`"`), count: 1, among: names(h100, "52")},
		"product-name": {devices: gpus(1, product+` == "NVIDIA L4"`), count: 1, among: names(mixed, "32")},
		"little":       {devices: gpus(1, memory+`.compareTo(quantity("16Gi")) < 0`), count: 1, among: names(mixed, "ca")},
		"much":         {devices: gpus(2, memory+`.compareTo(quantity("60Gi")) >= 0`, numa+" == 5"), count: 2, among: names(a100, "b7", "bd")},
		"numa":         {devices: gpus(3, product+`.contains("H100")`, numa+" == 1"), count: 3, among: upperH100},
		"capability": {
			devices: gpus(
				1,
				`device.attributes["gpu.nvidia.com"].cudaComputeCapability == semver("8.0.0")`,
				memory+`.compareTo(quantity("24Gi")) == 0`,
			),
			count: 1,
			among: names(mixed, "31"),
		},
		"old-driver": {
			devices: gpus(1, `device.attributes["gpu.nvidia.com"].driverVersion.isLessThan(semver("560.0.0"))`, product+`.contains("A100")`),
			count:   1,
			among:   slices.Concat(names(mixed, "17"), allA100),
		},
	})
	u.refuse(map[string]wish{
		"absent-product": {devices: gpus(1, product+` == "NVIDIA B200"`)},
		"too-much":       {devices: gpus(1, memory+`.compareTo(quantity("81Gi")) >= 0`)},
		"absent-numa":    {devices: gpus(1, numa+" == 2")},
		"wrong-place":    {devices: gpus(1, product+`.contains("H100")`), node: plain},
	})
}

func (w *world) testConstraints(t *testing.T) {
	u := w.tenant(t)
	u.grant(map[string]wish{
		"one-root":   {node: mixed, devices: gpus(2) + match(pcieRoot), count: 2, among: names(mixed, "31", "32"), same: pcieRoot},
		"one-socket": {node: h100, devices: gpus(3) + match(numaNode), count: 3, among: allH100, same: numaNode},
	})
	// As many GPUs are still free, but not at the same PCIe root or NUMA node, so these Pods must
	// wait.
	u.refuse(map[string]wish{
		"no-other-pair":   {node: mixed, devices: gpus(2) + match(pcieRoot)},
		"no-five-of-four": {node: h100, devices: gpus(5) + match(numaNode)},
	})
	v := w.tenant(t)
	u.end("one-root", "one-socket", "no-other-pair", "no-five-of-four")
	v.grant(map[string]wish{
		"three-roots": {
			node:     mixed,
			devices:  gpus(3) + distinct(pcieRoot),
			count:    3,
			among:    names(mixed, "17", "31", "32", "ca"),
			distinct: pcieRoot,
		},
		"two-sockets": {node: h100, devices: gpus(2) + distinct(numaNode), count: 2, among: allH100, distinct: numaNode},
	})
	v.refuse(map[string]wish{
		"no-third-socket": {node: h100, devices: gpus(3) + distinct(numaNode)},
	})
}

// end deletes Pods and returns when they are gone.
func (u tenant) end(pods ...string) {
	u.t.Helper()
	if _, err := u.Kubectl(u.t.Context(), append([]string{"-n", u.namespace, "delete", "pods", "--timeout=6m"}, pods...)...); err != nil {
		u.t.Fatal(err)
	}
}

// firstAvailable returns a claim for one GPU with a prioritized list (firstAvailable in a request).
// Each element of kinds is the name and the CEL expression of one list entry.
func firstAvailable(kinds ...[2]string) string {
	var subrequests []string
	for _, kind := range kinds {
		subrequests = append(
			subrequests,
			fmt.Sprintf("{name: %s, deviceClassName: gpu.nvidia.com, selectors: [{cel: {expression: %q}}]}", kind[0], kind[1]),
		)
	}
	return "requests: [{name: gpu, firstAvailable: [" + strings.Join(subrequests, ", ") + "]}]"
}

func (w *world) testPrioritizedList(t *testing.T) {
	u := w.tenant(t)
	b200, l4, rest := [2]string{"b200", product + `.contains("B200")`}, [2]string{"l4", product + ` == "NVIDIA L4"`}, [2]string{"any", "true"}
	t4 := [2]string{"t4", product + `.contains("T4")`}
	u.grant(map[string]wish{
		"second": {devices: firstAvailable(b200, t4, rest), count: 1, among: names(mixed, "ca"), request: "gpu/t4"},
		"first":  {devices: firstAvailable(l4, rest), count: 1, among: names(mixed, "32"), request: "gpu/l4"},
	})
	// The only L4 is taken, so the same list must give its next entry. A Pod must wait if its list has
	// no other entry.
	u.grant(map[string]wish{
		"next": {node: mixed, devices: firstAvailable(l4, rest), count: 1, among: names(mixed, "17", "31"), request: "gpu/any"},
	})
	u.refuse(map[string]wish{"none": {devices: firstAvailable(b200, l4)}})
}

func (w *world) testAdminAccess(t *testing.T) {
	const everything = `requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, allocationMode: All, adminAccess: true}}]`
	u := w.tenant(t)
	if err := u.tryClaim("look", everything); err == nil || !strings.Contains(err.Error(), "resource.kubernetes.io/admin-access: true") {
		t.Errorf("admin access in an ordinary namespace: %v", err)
	}
	// Switch partitions on demand off: with them, admin access waits until the GPU's claim ends
	// (https://github.com/kubernetes/kubernetes/issues/140729).
	w.annotate(t, h100, "static")
	w.offersShapes(t, h100, 8, 0)
	u.template("all", gpus(8))
	u.pod("user", onNode(h100), fromTemplate("gpus", "all"))
	u.running("user")

	admin := w.tenant(t)
	label := []byte(`{"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}`)
	if _, err := w.Client.CoreV1().Namespaces().Patch(t.Context(), admin.namespace, "application/strategic-merge-patch+json", label,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	admin.template("look", everything)
	admin.pod("look", onNode(h100), fromTemplate("gpus", "look"))
	admin.pod("second-look", onNode(h100), fromTemplate("gpus", "look"))
	admin.running("look", "second-look")
	held := u.allocated("user", "gpus")
	if got := admin.allocated("look", "gpus"); len(held) != 8 || !slices.Equal(got, held) {
		t.Errorf("the user's claim has %v, but the admin's claim has %v", held, got)
	}
	if w.sim.SMI != "" {
		admin.sees("look", "", held)
	}
	// Admin access must not take a GPU from its claim: neither by ending before that claim, nor while
	// the next claim gets the GPU.
	admin.end("second-look")
	if w.sim.SMI != "" {
		u.sees("user", "", held)
	}
	u.end("user")
	u.pod("user-2", onNode(h100), fromTemplate("gpus", "all"))
	u.running("user-2")
	if w.sim.SMI != "" {
		u.sees("user-2", "", held)
		admin.sees("look", "", held)
	}
	admin.end("look")
	u.end("user-2")
	w.annotate(t, h100, "")
	w.offersShapes(t, h100, 8, 8*everyPartition)
}
