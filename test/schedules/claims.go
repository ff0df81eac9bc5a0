package schedules

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// phase is what the kubelet thinks of a claim.
type phase string

const (
	idle      phase = "idle"      // it holds nothing
	wanted    phase = "wanted"    // Prepare was called, and has not succeeded
	prepared  phase = "prepared"  // Prepare has succeeded
	leaving   phase = "leaving"   // Unprepare was called, and has not succeeded
	forgotten phase = "forgotten" // the API server has it no more, or otherwise, and the kubelet did not unprepare it
)

// claim is one as the API server and the kubelet know it.
type claim struct {
	name string
	uid  types.UID
	// now is what the API server has. It is nil if there is none; not allocated if nobody uses it.
	now   *resourceapi.ResourceClaim
	phase phase
	// got is the allocation that Prepare has last succeeded for.
	got *resourceapi.ResourceClaim
	// calls are those of the kubelet that have not ended.
	calls []*call
	// unspecified says that its spec may be gone: someone removed it, or the node was started again, or a GPU was reset.
	unspecified bool
	// before is how often each GPU was disturbed, and the supervisor, when the kubelet was told that it is prepared.
	before []int
	uids   []types.UID
	// kind is what it was last allocated, on these GPUs.
	kind template
	on   []string
	// allocations counts how often it was allocated: each has share IDs of its own.
	allocations int
	// returns counts how often the kubelet's Unprepare of it has succeeded.
	returns int
}

// call is one of the kubelet's.
type call struct {
	claim   *claim
	process *process
	what    string
	of      *resourceapi.ResourceClaim
	cancel  context.CancelFunc
	// abandoned says that the kubelet does not wait for it any more. The call need not have heard of that.
	abandoned bool
	// overtaken says that the claim was given back by the same instance since the call came.
	overtaken bool
	// returns is how often the claim had been given back when it came.
	returns int
	// before is how often each GPU was disturbed, and the supervisor, when it began.
	before []int
}

// rebooted is a node that was started again: the kubelet prepares every claim before a container starts.
func (c *claim) rebooted() {
	c.unspecified = true
	if c.phase == prepared {
		c.phase = wanted
	}
}

// reserve is the scheduler's word that a Pod may use the claim.
func (c *claim) reserve() {
	c.now = c.now.DeepCopy() // others have the one before
	c.now.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "uid-pod"}}
}

// release is what comes in the API server after a Pod has ended and its claims were given back: no Pod may use the claim any more.
func (c *claim) release(uid types.UID) {
	if c.now != nil && c.now.UID == uid {
		c.now = c.now.DeepCopy()
		c.now.Status.ReservedFor = nil
	}
}

func (c *claim) isReserved() bool { return c.now != nil && len(c.now.Status.ReservedFor) > 0 }

// isAbout says whether a file is the claim's record.
func (c *claim) isAbout(path string) bool {
	uid, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(path), ".json"), "_")
	return string(c.uid) == uid
}

func (c *claim) String() string { return fmt.Sprintf("claim %s (%s)", c.name, c.phase) }

type result = resourceapi.DeviceRequestAllocationResult

// template is a kind of claim.
type template struct {
	name    string
	results func(gpus []string) []result
	kind    string
	sharing string
}

const (
	slicing = `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`
	shorter = `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Short"}}`
	byMPS   = `{"strategy":"MPS"}`
)

func on(request, device string) result {
	return result{Request: request, Driver: driverName, Pool: pool, Device: device}
}

func part(request, gpu string, profile, start int) result {
	return on(request, fmt.Sprintf("%s-mig-%d-%d", gpu, profile, start))
}

// share is one of a device, with a limit or without.
func share(of result, limited bool) result {
	of.Device += "-share"
	of.ShareID = ptr.To(types.UID("share-" + of.Request))
	capacity := map[resourceapi.QualifiedName]resource.Quantity{device.CapacityShares: resource.MustParse("1")}
	if limited {
		capacity = map[resourceapi.QualifiedName]resource.Quantity{device.CapacityMemory: resource.MustParse("8Gi"), device.CapacityCores: resource.MustParse("20")}
	}
	of.ConsumedCapacity = capacity
	return of
}

func admin(of result) result {
	of.AdminAccess = ptr.To(true)
	return of
}

// templates are the kinds of claims, on a GPU that comes first and another.
var templates = []template{
	{"whole", func(g []string) []result { return []result{on("a", g[0])} }, "", ""},
	{"two wholes", func(g []string) []result { return []result{on("a", g[0]), on("b", g[1])} }, "", ""},
	{"whole, time slices", func(g []string) []result { return []result{on("a", g[0])} }, "GpuConfig", slicing},
	{"whole, MPS", func(g []string) []result { return []result{on("a", g[0])} }, "GpuConfig", byMPS},
	{"two wholes, MPS", func(g []string) []result { return []result{on("a", g[0]), on("b", g[1])} }, "GpuConfig", byMPS},
	{"partition", func(g []string) []result { return []result{part("a", g[0], 19, 0)} }, "", ""},
	{"other partition", func(g []string) []result { return []result{part("a", g[0], 19, 1)} }, "", ""},
	{"large partition", func(g []string) []result { return []result{part("a", g[0], 9, 0)} }, "", ""},
	{"upper partition", func(g []string) []result { return []result{part("a", g[0], 9, 4)} }, "", ""},
	{"partitions", func(g []string) []result { return []result{part("a", g[0], 19, 2), part("b", g[1], 19, 0)} }, "", ""},
	{"partition, MPS", func(g []string) []result { return []result{part("a", g[0], 19, 3)} }, "MigDeviceConfig", byMPS},
	{"partition and whole", func(g []string) []result { return []result{part("a", g[0], 19, 0), on("b", g[1])} }, "", ""},
	{"fraction", func(g []string) []result { return []result{share(on("a", g[0]), true)} }, "", ""},
	{"fractions", func(g []string) []result { return []result{share(on("a", g[0]), true), share(on("b", g[0]), true)} }, "", ""},
	{"share", func(g []string) []result { return []result{share(on("a", g[0]), false)} }, "GpuConfig", slicing},
	{"share, shorter", func(g []string) []result { return []result{share(on("a", g[0]), false)} }, "GpuConfig", shorter},
	{"fraction of a partition", func(g []string) []result { return []result{share(part("a", g[0], 19, 0), true)} }, "", ""},
	{"share of a partition", func(g []string) []result { return []result{share(part("a", g[0], 19, 0), false)} }, "", ""},
	{"admin", func(g []string) []result { return []result{admin(on("a", g[0]))} }, "", ""},
}

// allocate makes the claim one of that kind.
func (c *claim) allocate(t template, gpus []string) {
	c.allocations++
	c.kind, c.on = t, gpus
	devices := t.results(gpus)
	for i := range devices {
		if id := devices[i].ShareID; id != nil {
			devices[i].ShareID = ptr.To(types.UID(fmt.Sprintf("%s-%s-%d", *id, c.uid, c.allocations)))
		}
	}
	c.now = &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: c.name, UID: c.uid},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: devices}},
		},
	}
	c.reserve()
	if t.sharing != "" {
		c.now.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     driverName,
				Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + t.kind + `","sharing":` + t.sharing + `}`)},
			}},
		}}
	}
}

func results(c *resourceapi.ResourceClaim) []result {
	if c == nil || c.Status.Allocation == nil {
		return nil
	}
	return c.Status.Allocation.Devices.Results
}

func (n *node) gpu(name string) *gpu {
	for _, g := range n.gpus {
		if g.name() == name {
			return g
		}
	}
	return nil
}

// conflict finds devices of two claims that cannot be held at once.
func (n *node) conflict(a, b *resourceapi.ResourceClaim) string {
	for _, x := range results(a) {
		for _, y := range results(b) {
			if ptr.Deref(x.AdminAccess, false) || ptr.Deref(y.AdminAccess, false) {
				continue
			}
			p, _ := device.ParseName(x.Device)
			q, _ := device.ParseName(y.Device)
			known := device.GPU{MIG: &device.MIG{Profiles: profiles}}
			if device.Conflict(p, q, known) || p.Share && x.Device == y.Device && isLimited(x) != isLimited(y) {
				return x.Device + " and " + y.Device
			}
		}
	}
	return ""
}

// overfull finds a device of the claim's of which it holds more memory, together with others, than there is.
func (n *node) overfull(of *resourceapi.ResourceClaim, others []*resourceapi.ResourceClaim) string {
	known := device.GPU{MemoryBytes: gpuMemory, MIG: &device.MIG{Profiles: profiles}}
	for _, r := range results(of) {
		name, _ := device.ParseName(r.Device)
		total, isKnown := (device.ShareRules{}).Totals(known, 0, name)[device.CapacityMemory]
		var sum resource.Quantity
		for _, c := range append(others, of) {
			for _, held := range results(c) {
				if held.Device == r.Device {
					sum.Add(held.ConsumedCapacity[device.CapacityMemory])
				}
			}
		}
		if isKnown && sum.Cmp(total) > 0 {
			return fmt.Sprintf("%s of %s of %s", sum.String(), total.String(), r.Device)
		}
	}
	return ""
}

// disagree says whether two claims for shares of one device want it shared in different ways.
func disagree(a, b *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(results(a), func(x result) bool {
		return slices.ContainsFunc(results(b), func(y result) bool { return x.Device == y.Device && sharingOf(a) != sharingOf(b) })
	})
}

func isLimited(r result) bool {
	_, limited := r.ConsumedCapacity[device.CapacityMemory]
	return limited
}

// sharingOf is how the claim wants its devices to be shared.
func sharingOf(c *resourceapi.ResourceClaim) string {
	for _, t := range []string{slicing, shorter, byMPS} {
		if len(c.Status.Allocation.Devices.Config) > 0 && strings.Contains(string(c.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw), t) {
			return t
		}
	}
	return ""
}
