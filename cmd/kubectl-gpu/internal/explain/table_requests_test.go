package explain_test

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// requestSituations are decided by constraints, lists of alternatives, admin access and shares.
var requestSituations = []situation{
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
}
