package explain_test

import (
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// allocatedSituations are claims that have their devices, or that no Pod waits for.
var allocatedSituations = []situation{
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
