package explain_test

import (
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// clusterSituations are decided by nodes, Pods, missing objects and extended resources.
var clusterSituations = []situation{
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
}
