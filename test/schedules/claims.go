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

// phase is the kubelet's view of a claim.
type phase string

const (
	idle      phase = "idle"      // the claim holds no devices
	wanted    phase = "wanted"    // Prepare was called and has not succeeded
	prepared  phase = "prepared"  // Prepare has succeeded
	leaving   phase = "leaving"   // Unprepare was called and has not succeeded
	forgotten phase = "forgotten" // the claim was deleted or deallocated before an Unprepare
)

// claim is a claim as the API server knows it (now) and as the kubelet knows it (phase, got). The
// two can differ, for example if the claim was deleted without the kubelet.
type claim struct {
	name string
	uid  types.UID
	// now is the claim's object in the API server, or nil if the claim was deleted or deallocated.
	now   *resourceapi.ResourceClaim
	phase phase
	// got is the claim object with which the last successful Prepare was called.
	got *resourceapi.ResourceClaim
	// calls are the kubelet's calls for this claim that are in flight.
	calls []*call
	// specMayBeGone is set when an admin removed the claim's CDI spec, the node rebooted, or a GPU was
	// reset.
	specMayBeGone bool
	// disturbed is the value of [world.disturbances] when Prepare succeeded.
	disturbed []int
	uids      []types.UID
	// kind and gpus are the template and the GPUs of the claim's last allocation.
	kind template
	gpus []string
	// allocations counts how often the claim was allocated. Each allocation has its own share IDs.
	allocations int
	// unprepares counts the kubelet's successful Unprepare calls.
	unprepares int
}

// call is a Prepare or Unprepare call of the kubelet.
type call struct {
	claim   *claim
	process *process
	what    string
	object  *resourceapi.ResourceClaim
	cancel  context.CancelFunc
	// abandoned is set when the kubelet no longer waits for the call. The plugin may not notice that,
	// and may complete the call.
	abandoned bool
	// overtaken is set when the plugin instance unprepared the claim after this call had arrived.
	overtaken bool
	// rebound is set when another driver took a GPU during the call to which its claim has admin
	// access.
	rebound bool
	// unprepares is the value of claim.unprepares when the call arrived.
	unprepares int
	// disturbed is the value of [world.disturbances] at the beginning of the call.
	disturbed []int
}

// rebooted notes that the node has rebooted. The kubelet must then prepare the claim again before a
// container starts.
func (c *claim) rebooted() {
	c.specMayBeGone = true
	if c.phase == prepared {
		c.phase = wanted
	}
}

// reserve allows a Pod to use the claim, as the scheduler does.
func (c *claim) reserve() {
	c.now = c.now.DeepCopy() // calls in flight still use the old object
	c.now.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "uid-pod"}}
}

// release removes the Pod's reservation, as the control plane does after a Pod has ended and its
// claims were unprepared.
func (c *claim) release(uid types.UID) {
	if c.now != nil && c.now.UID == uid {
		c.now = c.now.DeepCopy()
		c.now.Status.ReservedFor = nil
	}
}

func (c *claim) isReserved() bool { return c.now != nil && len(c.now.Status.ReservedFor) > 0 }

// isAbout reports whether path is the file of this claim's checkpoint record.
func (c *claim) isAbout(path string) bool {
	uid, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(path), ".json"), "_")
	return string(c.uid) == uid
}

func (c *claim) String() string { return fmt.Sprintf("claim %s (%s)", c.name, c.phase) }

type result = resourceapi.DeviceRequestAllocationResult

// template is a kind of claim, such as one for a whole GPU or for a partition. Function allocate
// makes a claim's allocation from a template.
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

// share returns an allocation result for a share of the device that the given result names. limited
// says whether the share has a limited part of the device's memory and compute.
func share(of result, limited bool) result {
	of.Device += "-share"
	of.ShareID = ptr.To(types.UID("share-" + of.Request))
	capacity := map[resourceapi.QualifiedName]resource.Quantity{device.CapacityShares: resource.MustParse("1")}
	if limited {
		capacity = map[resourceapi.QualifiedName]resource.Quantity{
			device.CapacityMemory: resource.MustParse("8Gi"), device.CapacityCores: resource.MustParse("20"),
		}
	}
	of.ConsumedCapacity = capacity
	return of
}

func admin(of result) result {
	of.AdminAccess = ptr.To(true)
	return of
}

// templates are the kinds of claims. g[0] and g[1] are the names of two GPUs.
var templates = []template{
	{"whole", func(g []string) []result { return []result{on("a", g[0])} }, "", ""},
	{"two whole GPUs", func(g []string) []result { return []result{on("a", g[0]), on("b", g[1])} }, "", ""},
	{"whole, time slices", func(g []string) []result { return []result{on("a", g[0])} }, "GpuConfig", slicing},
	{"whole, MPS", func(g []string) []result { return []result{on("a", g[0])} }, "GpuConfig", byMPS},
	{"two whole GPUs, MPS", func(g []string) []result { return []result{on("a", g[0]), on("b", g[1])} }, "GpuConfig", byMPS},
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
	{"passthrough", func(g []string) []result { return []result{on("a", g[0]+"-vfio")} }, "", ""},
	{"passthrough and partition", func(g []string) []result { return []result{on("a", g[0]+"-vfio"), part("b", g[1], 19, 0)} }, "", ""},
	{"admin", func(g []string) []result { return []result{admin(on("a", g[0]))} }, "", ""},
}

// allocate gives the claim a new allocation from template t on the named GPUs, and reserves the
// claim for a Pod.
func (c *claim) allocate(t template, gpus []string) {
	c.allocations++
	c.kind, c.gpus = t, gpus
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
				Driver: driverName,
				Parameters: runtime.RawExtension{
					Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + t.kind + `","sharing":` + t.sharing + `}`),
				},
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

// conflict returns the names of a device of claim a and a device of claim b that cannot be in use
// at the same time. It returns an empty string if there are none.
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

// overfull adds up the memory that the claim in parameter of and the other claims hold of each
// device of that claim. If a device has less memory than that, the result describes the device.
// Otherwise it is empty.
func (n *node) overfull(of *resourceapi.ResourceClaim, others []*resourceapi.ResourceClaim) string {
	known := device.GPU{MemoryBytes: gpuMemory, MIG: &device.MIG{Profiles: profiles}}
	for _, r := range results(of) {
		name, _ := device.ParseName(r.Device)
		total, isKnown := device.FractionTotals(known, name)[device.CapacityMemory]
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

// disagree reports whether claims a and b share a device but ask for different sharing
// configurations, so that only one of them can be prepared.
func disagree(a, b *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(results(a), func(x result) bool {
		return slices.ContainsFunc(results(b), func(y result) bool { return x.Device == y.Device && sharingOf(a) != sharingOf(b) })
	})
}

func isLimited(r result) bool {
	_, limited := r.ConsumedCapacity[device.CapacityMemory]
	return limited
}

// sharingOf returns the claim's sharing configuration as JSON, or an empty string if it has none.
func sharingOf(c *resourceapi.ResourceClaim) string {
	for _, t := range []string{slicing, shorter, byMPS} {
		all := c.Status.Allocation.Devices.Config
		if len(all) > 0 && strings.Contains(string(all[0].Opaque.Parameters.Raw), t) {
			return t
		}
	}
	return ""
}
