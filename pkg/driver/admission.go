package driver

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// admission says whether a claim may be prepared now.
type admission struct {
	// node knows what may be prepared, and why not more. health has the verdicts on the devices.
	node     *nodeview.Node
	health   *loop.Loop
	hardware *quiesce.Access
}

// Admit is [prepare.Options].Admit. It refuses what the inventory cannot: while the GPUs are
// released, a claim that NVIDIA's DRA driver prepared, and a GPU that is lost or hangs.
func (a admission) Admit(c *resourceapi.ResourceClaim, old checkpoint.Record) (done func(), err error) {
	done, ok := a.hardware.Use() // before View: if it is denied, the View says why
	v := a.node.View()
	for _, held := range v.ReferenceClaims {
		if held.UID == c.UID { // it already has devices, under names that this driver does not know
			return done, cause.Errorf(cause.Claim,
				"NVIDIA's DRA driver prepared it on this node as %s: its Pods keep running but cannot restart here: delete them",
				strings.Join(held.DeviceNames(), ", "))
		}
	}
	if c.Status.Allocation != nil {
		for _, result := range c.Status.Allocation.Devices.Results {
			if err := a.checkReachable(v, result, old); err != nil {
				return done, err
			}
		}
	}
	if !ok {
		return done, steps.NotReady(v.Preparable)
	}
	return done, nil
}

// checkReachable refuses a device of a GPU that is lost or hangs, unless the claim has the device.
// To prepare a whole GPU the driver does not query the hardware, so without this check a container
// would start with such a GPU.
func (a admission) checkReachable(v *nodeview.View, result resourceapi.DeviceRequestAllocationResult, old checkpoint.Record) error {
	n, ok := device.ParseName(result.Device)
	i := slices.IndexFunc(v.GPUs, func(g nvidia.GPU) bool { return g.WholeName() == n.GPU })
	has := old.State == checkpoint.Prepared &&
		slices.ContainsFunc(old.Devices, func(d checkpoint.Device) bool { return d.Device == result.Device })
	if result.Driver != DriverName || !ok || i < 0 || has {
		return nil
	}
	if unreachable := a.health.View().Of(v.GPUs[i].GPU, n).Unreachable(); unreachable != "" {
		return cause.Errorf(cause.Device,
			"request %s was allocated device %s, which cannot be prepared: %s", result.Request, result.Device, unreachable)
	}
	return nil
}
