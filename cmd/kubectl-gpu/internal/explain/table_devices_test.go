package explain_test

import (
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// deviceSituations are decided by which devices match, are free and have no taint.
var deviceSituations = []situation{
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
}
