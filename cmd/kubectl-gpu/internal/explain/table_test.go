package explain_test

import (
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

type situation struct {
	name    string
	build   func(*fleettest.Cluster)
	ask     string // "pod p" if it is empty
	version string // v1.37.0 if it is empty
	state   explain.State
	want    []string
	not     []string
}

const (
	h100     = fleettest.H100
	gpuClass = "gpu.nvidia.com"
	migClass = "mig.nvidia.com"
	shared   = "shared.gpu.nvidia.com"
	xid      = "gpu.nvidia.com/xid"
)

// wants adds a claim and the Pod p, which uses it.
func wants(c *fleettest.Cluster, requests ...resourceapi.DeviceRequest) (*resourceapi.ResourceClaim, *corev1.Pod) {
	return c.Claim("want", requests...), c.Pod("p", "want")
}

func gpus(n int64, selectors ...string) resourceapi.DeviceRequest {
	return fleettest.Request("gpu", gpuClass, n, selectors...)
}

func profile(p string) resourceapi.DeviceRequest {
	return fleettest.Request("gpu", migClass, 1, fleettest.IsProfile(p))
}

func all(class string) resourceapi.DeviceRequest {
	r := fleettest.Request("gpu", class, 0)
	r.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return r
}

func fraction(memory string) resourceapi.DeviceRequest {
	r := fleettest.Request("gpu", shared, 1)
	r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse(memory),
	}}
	return r
}

func admin(r resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	r.Exactly.AdminAccess = ptr.To(true)
	return r
}

func match(attribute string, requests ...string) resourceapi.DeviceConstraint {
	return resourceapi.DeviceConstraint{Requests: requests, MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(attribute))}
}

func deleted(m *metav1.ObjectMeta) {
	m.DeletionTimestamp, m.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"resource.kubernetes.io/delete-protection"}
}

// passthrough makes a device one for virtual machines.
func passthrough(c *fleettest.Cluster, node, name string) {
	for _, slice := range c.Slices {
		for i := range slice.Spec.Devices {
			if d := &slice.Spec.Devices[i]; slice.Spec.Pool.Name == node && d.Name == name {
				d.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("vfio")}
			}
		}
	}
}

var gpu0, gpu1 = fleettest.Device(0), fleettest.Device(1)

const (
	id1g, id2g, id3g, id4g = 19, 14, 9, 5 // profile IDs of an H100
)

var situations = []situation{
	{
		name:  "fits",
		build: func(c *fleettest.Cluster) { c.Node("n1", h100, 2, "static", ""); wants(c, gpus(1)) },
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n1). The scheduler has not placed it yet."},
	},
	{
		name: "every GPU taken",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			c.Held("train-1", "n1", gpu0)
			c.Held("train-2", "n1", gpu1)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"Pod team-a/p does not fit on the only node.",
			"all 2 matching devices are allocated to team-a/train-1, team-a/train-2",
			"n1: delete team-a/train-1-pod, which has claim team-a/train-1",
		},
	},
	{
		name: "an idle claim holds the GPU",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Held("forgotten", "n1", gpu0)
			c.Pods = nil
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want:  []string{"the only matching device is allocated to team-a/forgotten", "n1: delete claim team-a/forgotten, which no Pod uses"},
	},
	{
		name: "too many for the node",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			wants(c, gpus(4))
		},
		state: explain.Waits,
		want:  []string{"the request needs 4 devices, and 2 of the 2 that match are free", "n1: ask for 2 instead of 4 devices in request gpu"},
	},
	{
		name: "count partly taken",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 4, "static", "")
			c.Held("train-1", "n1", gpu0)
			wants(c, gpus(4))
		},
		state: explain.Waits,
		want: []string{
			"1 of 4 matching devices is allocated to team-a/train-1", "the request needs 4 devices, and 3 of the 4 that match are free",
			"n1: delete team-a/train-1-pod, which has claim team-a/train-1", "n1: ask for 3 instead of 4 devices in request gpu",
		},
	},
	{
		name: "more than a claim can have",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			wants(c, gpus(33))
		},
		state: explain.Blocked, want: []string{"the request needs 33 devices, and a claim can have 32"},
	},
	{
		name: "selector of the request",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			wants(c, gpus(1, "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA B200'"))
		},
		state: explain.Waits,
		want: []string{
			"2 of 2 devices do not match a selector of the request: device.attributes['gpu.nvidia.com'].productName == 'NVIDIA B200'",
			"n1: remove the selector device.attributes['gpu.nvidia.com'].productName == 'NVIDIA B200' from request gpu",
		},
	},
	{
		name: "selector of the class",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			wants(c, fleettest.Request("gpu", migClass, 1))
		},
		state: explain.Waits,
		want:  []string{"2 of 2 devices do not match a selector of class mig.nvidia.com: " + fleettest.IsType("mig")},
	},
	{
		name: "two selectors fail on different devices",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			wants(c, profile("9g.999gb"))
		},
		state: explain.Waits,
		want: []string{
			"1 of 26 devices does not match a selector of class mig.nvidia.com",
			"25 of 26 devices do not match a selector of the request",
		},
	},
	{
		name: "selector reads a missing attribute",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			wants(c, fleettest.Request("gpu", gpuClass, 1, fleettest.IsProfile("1g.10gb")))
		},
		state: explain.Blocked,
		want: []string{
			"A selector of the request fails on device " + gpu0 + " of n1, which stops scheduling on all nodes",
			"remove the selector " + fleettest.IsProfile("1g.10gb") + " from request gpu",
		},
	},
	{
		name: "selector does not compile",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, gpus(1, "device.nothing == 1"))
		},
		state: explain.Blocked, want: []string{"which stops scheduling on all nodes: device.nothing == 1"},
	},
	{
		name: "partition short of memory slices",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			c.Held("half", "n1", fleettest.Device(0, id4g, 0))
			wants(c, profile("4g.40gb"))
		},
		state: explain.Waits,
		want: []string{
			"the only matching device is allocated to team-a/half",
			"n1: delete team-a/half-pod, which has claim team-a/half",
			"n1: ask for 3g.40gb instead of 4g.40gb in request gpu (class mig.nvidia.com)",
		},
	},
	{
		name: "smaller partition fits",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			c.Held("half", "n1", fleettest.Device(0, id3g, 0))
			c.Held("tiny", "n1", fleettest.Device(0, id1g, 4))
			wants(c, profile("3g.40gb"))
		},
		state: explain.Waits,
		want: []string{
			"1 of 2 matching devices is allocated to team-a/half",
			"1 of 2 matching devices needs what team-a/tiny holds (memory-slice-4)",
			"n1: delete team-a/tiny-pod, which has claim team-a/tiny",
		},
	},
	{
		name: "whole GPU against partitions",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			c.Held("a", "n1", fleettest.Device(0, id1g, 0))
			c.Held("b", "n1", fleettest.Device(0, id1g, 6))
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"the only matching device needs what team-a/a, team-a/b hold",
			"n1: delete team-a/a-pod, which has claim team-a/a, and delete team-a/b-pod, which has claim team-a/b",
			"instead of a whole GPU in request gpu (class mig.nvidia.com)",
		},
	},
	{
		name: "the card with the fewest claims is named",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "dynamic", "")
			c.Held("a", "n1", fleettest.Device(0, id1g, 0))
			c.Held("b", "n1", fleettest.Device(0, id1g, 6))
			c.Held("lonely", "n1", fleettest.Device(1, id1g, 3))
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want:  []string{"n1: delete team-a/lonely-pod, which has claim team-a/lonely\n"},
		not:   []string{"delete team-a/a-pod"},
	},
	{
		name: "a tainted GPU",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Taint("n1", gpu0, xid, "79", resourceapi.DeviceTaintEffectNoExecute)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"the only matching device has the taint gpu.nvidia.com/xid=79:NoExecute, which the request does not tolerate",
			"n1: tolerate the taint gpu.nvidia.com/xid=79:NoExecute in request gpu",
		},
	},
	{
		name: "the node is not ready",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			c.Taint("n1", "", "gpu.nvidia.com/not-ready", "driver-missing", resourceapi.DeviceTaintEffectNoSchedule)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"all 2 matching devices have the taint gpu.nvidia.com/not-ready=driver-missing:NoSchedule",
			"n1: make node n1 ready again (driver-missing): kubectl gpu doctor says how",
		},
		not: []string{"tolerate the taint"},
	},
	{
		name: "a taint of a rule",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Rules = append(c.Rules, &resourceapi.DeviceTaintRule{
				ObjectMeta: metav1.ObjectMeta{Name: "maintenance"},
				Spec: resourceapi.DeviceTaintRuleSpec{
					DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To("n1")},
					Taint:          resourceapi.DeviceTaint{Key: "example.com/maintenance", Effect: resourceapi.DeviceTaintEffectNoSchedule},
				},
			})
			wants(c, gpus(1))
		},
		state: explain.Waits, want: []string{"has the taint example.com/maintenance:NoSchedule"},
	},
	{
		name: "a tolerated taint",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Taint("n1", gpu0, xid, "31", resourceapi.DeviceTaintEffectNoSchedule)
			r := gpus(1)
			r.Exactly.Tolerations = []resourceapi.DeviceToleration{{Key: xid, Operator: resourceapi.DeviceTolerationOpExists}}
			wants(c, r)
		},
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n1)."},
	},
	{
		name: "an informing taint excludes nothing",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Taint("n1", gpu0, xid, "63", resourceapi.DeviceTaintEffectNone)
			wants(c, gpus(1))
		},
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n1)."},
	},
	{
		name: "tainted and taken",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Taint("n1", gpu0, xid, "79", resourceapi.DeviceTaintEffectNoSchedule)
			c.Held("train", "n1", gpu0)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"is allocated to team-a/train", "has the taint gpu.nvidia.com/xid=79:NoSchedule",
			"n1: delete team-a/train-pod, which has claim team-a/train, and tolerate the taint gpu.nvidia.com/xid=79:NoSchedule in request gpu",
		},
	},
	{
		name: "one taken, one tainted: two ways out",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			c.Taint("n1", gpu1, xid, "79", resourceapi.DeviceTaintEffectNoSchedule)
			c.Held("train", "n1", gpu0)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"n1: delete team-a/train-pod, which has claim team-a/train\n",
			"n1: tolerate the taint gpu.nvidia.com/xid=79:NoSchedule in request gpu\n",
		},
	},
	{
		name: "match attribute",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 4, "static", "")
			c.Held("train", "n1", gpu0, fleettest.Device(2))
			claim, _ := wants(c, gpus(2))
			claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{match("resource.kubernetes.io/pcieRoot")}
		},
		state: explain.Waits,
		want: []string{
			"the constraint that resource.kubernetes.io/pcieRoot is equal excludes every choice of devices. " +
				"Free devices by value: pci0000:00: 1, pci0000:01: 1",
			"n1: remove the constraint that resource.kubernetes.io/pcieRoot is equal",
			"n1: ask for 1 instead of 2 devices in request gpu",
		},
	},
	{
		name: "distinct attribute",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			claim, _ := wants(c, gpus(2))
			claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{
				DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("resource.kubernetes.io/numaNode")),
			}}
		},
		state: explain.Waits, want: []string{"the constraint that resource.kubernetes.io/numaNode is different excludes every choice of devices"},
	},
	{
		name: "match attribute that no device has",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			claim, _ := wants(c, gpus(2))
			claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{match("gpu.nvidia.com/rack")}
		},
		state: explain.Waits,
		want: []string{
			"the constraint that gpu.nvidia.com/rack is equal excludes every choice of devices. Free devices by value: (none): 2",
		},
	},
	{
		name: "all devices of one node break a constraint",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "")
			c.Node("n2", h100, 1, "static", "")
			claim, _ := wants(c, all(gpuClass))
			claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{match("gpu.nvidia.com/parentUUID")}
		},
		state: explain.Blocked,
		want: []string{
			"a claim constraint would not be satisfied", "n1: remove the constraint that gpu.nvidia.com/parentUUID is equal",
		},
	},
	{
		name: "all devices, one taken",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 4, "static", "")
			c.Held("train", "n1", gpu0)
			wants(c, all(gpuClass))
		},
		state: explain.Waits,
		want: []string{
			"the request asks for all 4 matching devices, and 3 are free", "n1: delete team-a/train-pod, which has claim team-a/train",
			"n1: ask for 3 instead of 4 devices in request gpu",
		},
	},
	{
		name: "all devices of a kind that the node lacks",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, all(migClass))
		},
		state: explain.Waits, want: []string{"1 of 1 device does not match a selector of class mig.nvidia.com"},
	},
	{
		name: "all placements overlap",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			wants(c, all(migClass))
		},
		state: explain.Waits, want: []string{"each request alone has enough free devices, but together they need more than the GPUs have"},
	},
	{
		name: "two requests that exclude each other",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			four := profile("4g.40gb")
			four.Name = "big"
			whole := gpus(1)
			wants(c, whole, four)
		},
		state: explain.Waits, want: []string{"each request alone has enough free devices, but together they need more than the GPUs have"},
	},
	{
		name: "prioritized list",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			c.Held("train", "n1", gpu0)
			wants(c, resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
				fleettest.Alternative("whole", gpuClass, 1), fleettest.Alternative("half", migClass, 1, fleettest.IsProfile("3g.40gb")),
			}})
		},
		state: explain.Waits,
		want: []string{
			"request gpu/whole: the only matching device is allocated to team-a/train",
			"request gpu/half: all 2 matching devices need what team-a/train holds",
			"n1: delete team-a/train-pod, which has claim team-a/train",
		},
	},
	{
		name: "prioritized list falls back",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "dynamic", "")
			c.Held("a", "n1", gpu0)
			c.Held("b", "n1", fleettest.Device(1, id1g, 0))
			wants(c, resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
				fleettest.Alternative("whole", gpuClass, 1), fleettest.Alternative("half", migClass, 1, fleettest.IsProfile("3g.40gb")),
			}})
		},
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n1)."},
	},
	{
		name: "prioritized list without the gate",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
				fleettest.Alternative("whole", gpuClass, 1),
			}})
		},
		version: "v1.33.2", state: explain.Blocked,
		want: []string{"Request gpu/whole needs the feature gate DRAPrioritizedList, which this cluster does not have."},
	},
	{
		name: "admin access needs no free device",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Held("train", "n1", gpu0)
			wants(c, admin(gpus(1)))
		},
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n1)."},
	},
	{
		name: "admin access does not tolerate taints",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Taint("n1", "", "gpu.nvidia.com/not-ready", "no-gpu", resourceapi.DeviceTaintEffectNoSchedule)
			wants(c, admin(gpus(1)))
		},
		state: explain.Waits, want: []string{
			"the only matching device has the taint gpu.nvidia.com/not-ready=no-gpu:NoSchedule, which the request does not tolerate",
		},
	},
	{
		name: "admin access without the gate",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, admin(gpus(1)))
		},
		version: "v1.33.0", state: explain.Blocked, want: []string{"needs the feature gate DRAAdminAccess"},
	},
	{
		name: "share with too little memory left",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: fractions}]")
			c.HeldShare("a", "n1", gpu0+"-share", "memory=60Gi", "cores=0")
			wants(c, fraction("30Gi"))
		},
		state: explain.Waits,
		want: []string{
			"the only matching device has too little memory: the request asks for 30Gi, and at most",
			"team-a/a holds the rest", "n1: delete team-a/a-pod, which has claim team-a/a", "instead of 30Gi of memory in request gpu",
		},
	},
	{
		name: "share of a GPU that a claim has alone",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: fractions}]")
			c.Held("train", "n1", gpu0)
			wants(c, fraction("10Gi"))
		},
		state: explain.Waits, want: []string{"the only matching device needs what team-a/train holds (ofa-engines, memory-slice-0 to 7)"},
	},
	{
		name: "whole GPU with shares in use",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: fractions}]")
			c.HeldShare("a", "n1", gpu0+"-share", "memory=1Gi", "cores=0")
			c.HeldShare("b", "n1", gpu0+"-share", "memory=1Gi", "cores=0")
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want: []string{
			"the only matching device needs what team-a/a, team-a/b hold",
			"n1: delete team-a/a-pod, which has claim team-a/a, and delete team-a/b-pod, which has claim team-a/b",
		},
	},
	{
		name: "plain shares all given out",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: shares, count: 2}]")
			c.HeldShare("a", "n1", gpu0+"-share", "shares=1")
			c.HeldShare("b", "n1", gpu0+"-share", "shares=1")
			wants(c, fleettest.Request("gpu", shared, 1))
		},
		state: explain.Waits,
		want:  []string{"has too little shares: the request asks for 1, and at most 0 is left. team-a/a, team-a/b hold the rest"},
	},
	{
		name: "capacity without the gate",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, fraction("10Gi"))
		},
		version: "v1.35.0", state: explain.Blocked, want: []string{"needs the feature gate DRAConsumableCapacity"},
	},
	{
		name: "capacity that no device has",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: fractions}]")
			r := fraction("1Gi")
			r.Exactly.Capacity.Requests = map[resourceapi.QualifiedName]resource.Quantity{"bandwidth": resource.MustParse("1")}
			wants(c, r)
		},
		state: explain.Waits, want: []string{"too little bandwidth: the request asks for 1, and at most 0 is left"},
	},
	{
		name: "partitions without the gate",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			for _, s := range c.Slices {
				s.Spec.Pool.ResourceSliceCount = 1 // the slice with the counters is not counted
			}
			wants(c, gpus(1))
		},
		version: "v1.35.0", state: explain.Waits,
		want: []string{"needs the feature gate DRAPartitionableDevices, which this cluster does not have"},
	},
	{
		name: "node selector",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.NodeSelector = map[string]string{"pool": "training"}
		},
		state: explain.Waits,
		want:  []string{"the node lacks the label pool=training of the Pod's node selector", "n1: let the Pod's node selector allow node n1"},
	},
	{
		name: "node affinity",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}},
				}}},
			}}
		},
		state: explain.Waits, want: []string{"the Pod's node affinity excludes the node"},
	},
	{
		name: "cordoned and full elsewhere",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "").Spec.Unschedulable = true
			c.Node("n2", h100, 1, "static", "")
			c.Held("train", "n2", gpu0)
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want:  []string{"the node is cordoned", "n1: kubectl uncordon n1", "n2: delete team-a/train-pod, which has claim team-a/train"},
	},
	{
		name: "taint of the node",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "").Spec.Taints = []corev1.Taint{{Key: "gpu", Value: "yes", Effect: corev1.TaintEffectNoSchedule}}
			wants(c, gpus(1))
		},
		state: explain.Waits,
		want:  []string{"the Pod does not tolerate the node's taint gpu=yes:NoSchedule", "n1: tolerate the taints of node n1"},
	},
	{
		name: "no CPU left",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("65")}
		},
		state: explain.Waits,
		want: []string{
			"the Pod requests 65 of cpu, and 64 is left",
			"No change of one node or of the claim that this program tries would make it fit.",
		},
	},
	{
		name: "cordoned and taken: both are needed",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "").Spec.Unschedulable = true
			c.Held("train", "n1", gpu0)
			wants(c, gpus(1))
		},
		state: explain.Waits, want: []string{"n1: kubectl uncordon n1, and delete team-a/train-pod, which has claim team-a/train"},
	},
	{
		name: "no driver on the node",
		build: func(c *fleettest.Cluster) {
			c.PlainNode("cpu-1")
			c.PlainNode("cpu-2")
			wants(c, gpus(1))
		},
		state: explain.Waits, want: []string{"cpu-1, cpu-2\n    - no driver publishes devices for this node"},
	},
	{
		name: "pool is being updated",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			c.Slices = c.Slices[1:]
			wants(c, gpus(1))
		},
		state: explain.Waits, want: []string{"pool n1 of gpu.nvidia.com is being updated: 1 of its 2 slices are there"},
	},
	{
		name:  "no nodes",
		build: func(c *fleettest.Cluster) { wants(c, gpus(1)) },
		state: explain.Waits, want: []string{"Pod team-a/p waits: the cluster has no nodes."},
	},
	{
		name: "class missing",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			wants(c, fleettest.Request("gpu", "gpus.nvidia.com", 1))
		},
		state: explain.Blocked, want: []string{"Pod team-a/p cannot be scheduled on any node: DeviceClass gpus.nvidia.com does not exist."},
	},
	{
		name:  "claim missing",
		build: func(c *fleettest.Cluster) { c.Node("n1", h100, 1, "static", ""); c.Pod("p", "nothing") },
		state: explain.Blocked, want: []string{"ResourceClaim team-a/nothing does not exist. Create it."},
	},
	{
		name: "template missing",
		build: func(c *fleettest.Cluster) {
			c.Pod("p").Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("big")}}
		},
		state: explain.Blocked, want: []string{"ResourceClaimTemplate team-a/big does not exist. Create it."},
	},
	{
		name: "claim not created from its template",
		build: func(c *fleettest.Cluster) {
			c.Templates = append(c.Templates, &resourceapi.ResourceClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Namespace: fleettest.Namespace, Name: "big"},
			})
			c.Pod("p").Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("big")}}
		},
		state: explain.Blocked, want: []string{"The claim for gpu is not created yet from template big."},
	},
	{
		name: "claim being deleted",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			claim, _ := wants(c, gpus(1))
			deleted(&claim.ObjectMeta)
		},
		state: explain.Blocked, want: []string{"Claim team-a/want is being deleted."},
	},
	{
		name: "scheduling gate",
		build: func(c *fleettest.Cluster) {
			_, p := wants(c, gpus(1))
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		},
		state: explain.Blocked, want: []string{"The Pod has 1 scheduling gate (kueue.x-k8s.io/admission)."},
	},
	{
		name: "another claim ties the Pod to a full node",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Node("n2", h100, 1, "static", "")
			c.Held("mine", "n1", gpu0)
			c.Claim("want", gpus(1))
			c.Pod("p", "want", "mine")
		},
		state: explain.Waits,
		want:  []string{"claim team-a/mine already has devices of n1", "the only matching device is allocated to team-a/mine"},
	},
	{
		name: "extended resource",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Held("train", "n1", gpu0)
			c.Pod("p").Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		},
		state: explain.Waits, want: []string{
			"request nvidia.com/gpu: 1 device of class gpu.nvidia.com", "the only matching device is allocated to team-a/train",
		},
	},
	{
		name: "extended resource of the class made last",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "dynamic", "")
			late := c.Class("late", fleettest.IsType("mig"))
			late.CreationTimestamp, late.Spec.ExtendedResourceName = metav1.Unix(1, 0), ptr.To("nvidia.com/gpu")
			p := c.Pod("p")
			p.Spec.InitContainers = []corev1.Container{{Name: "init"}}
			p.Spec.InitContainers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
		},
		state: explain.Waits, want: []string{"request nvidia.com/gpu: 8 devices of class late"},
	},
	{
		name: "extended resource of a device plugin",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("0")
			c.PlainNode("n2").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("1")
			c.Held("train", "n1", gpu0)
			c.Pod("p").Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2")}
		},
		state: explain.Waits, want: []string{
			"n1\n    - the only matching device is allocated to team-a/train", "n2\n    - the Pod requests 2 of nvidia.com/gpu, and 1 is left",
		},
	},
	{
		name: "extended resource that a device plugin has free",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.PlainNode("n2").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("1")
			c.Held("train", "n1", gpu0)
			c.Pod("p").Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		},
		state: explain.Fits, want: []string{"Pod team-a/p fits on 1 node (n2)."},
	},
	{
		name: "another resource that no node has",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"example.com/nic": resource.MustParse("1")}
		},
		state: explain.Waits, want: []string{"the Pod requests 1 of example.com/nic, and 0 is left"},
	},
	{
		name: "no room for one more Pod",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 2, "static", "").Status.Allocatable[corev1.ResourcePods] = resource.MustParse("1")
			c.Held("train", "n1", gpu0)
			wants(c, gpus(1))
		},
		state: explain.Waits, want: []string{"the node has as many Pods as it may have"},
	},
	{
		name:  "Pod without claims",
		build: func(c *fleettest.Cluster) { c.Pod("p") },
		state: explain.NoDevices, want: []string{"uses no claim and no extended resource of a DeviceClass"},
	},
	{
		name:  "Pod has ended",
		build: func(c *fleettest.Cluster) { _, p := wants(c, gpus(1)); p.Status.Phase = corev1.PodSucceeded },
		state: explain.Ended, want: []string{"Pod team-a/p has ended (Succeeded)"},
	},
	{
		name: "Pod bypassed the scheduler",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.NodeName = "n1"
		},
		state: explain.Scheduled, want: []string{"spec.nodeName bypassed the scheduler"},
	},
	{
		name: "claim without a Pod", ask: "claim want",
		build: func(c *fleettest.Cluster) { c.Node("n1", h100, 1, "static", ""); c.Claim("want", gpus(1)) },
		state: explain.Unused, want: []string{"No Pod uses claim team-a/want."},
	},
	{
		name: "claim with its Pod", ask: "claim want",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			_, p := wants(c, gpus(1))
			p.Spec.NodeSelector = map[string]string{"a": "b"}
		},
		state: explain.Waits, want: []string{"the node lacks the label a=b", "Pod team-a/p waits with this claim"},
	},
	{
		name: "allocated share", ask: "claim a",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "[{kind: fractions}]")
			c.HeldShare("a", "n1", gpu0+"-share", "memory=10Gi", "cores=20")
			c.HeldShare("b", "n1", gpu0+"-share", "memory=1Gi", "cores=0")
		},
		state: explain.Allocated,
		want: []string{
			"Claim team-a/a has 1 device, for team-a/a-pod.", "a share of a GPU, " + gpu0 + "-share on n1 (cores 20, memory 10Gi)",
			"Shared with team-a/b", "sharing = MPS (pool)",
		},
	},
	{
		name: "allocated with configuration", ask: "claim a",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			claim := c.Held("a", "n1", gpu0)
			claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClass,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(
						`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`)},
				}},
			}}
			claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
				Driver: "gpu.nvidia.com", Pool: "n1", Device: gpu0,
				Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Prepared", Message: "ok"}},
			}}
		},
		state: explain.Allocated,
		want: []string{
			"a whole GPU, " + gpu0 + " on n1", "sharing.strategy = TimeSlicing (class)",
			"sharing.timeSlicingConfig.interval = Default (default)", "Ready=True Prepared ok",
		},
	},
	{
		name: "GPU for a virtual machine", ask: "claim vm",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			passthrough(c, "n1", gpu0)
			c.Held("vm", "n1", gpu0)
		},
		state: explain.Allocated, want: []string{"a whole GPU for a virtual machine, " + gpu0 + " on n1"},
	},
	{
		name: "device of a type that this version does not know", ask: "claim a",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			device := &c.Slices[0].Spec.Devices[0]
			device.Name, device.Attributes["type"] = gpu0+"-new", resourceapi.DeviceAttribute{StringValue: ptr.To("new")}
			c.Held("a", "n1", gpu0+"-new")
		},
		state: explain.Allocated, want: []string{"a device of type new, " + gpu0 + "-new on n1"},
	},
	{
		name: "device is no longer published", ask: "claim a",
		build: func(c *fleettest.Cluster) {
			c.Node("n1", h100, 1, "static", "")
			c.Held("a", "n1", fleettest.Device(7))
		},
		state: explain.Allocated, want: []string{"The driver no longer publishes this device."},
	},
}
