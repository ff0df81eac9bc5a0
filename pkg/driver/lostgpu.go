package driver

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// refuseLost returns an error if the health watcher reports one of the claim's devices as lost and
// the claim is not prepared yet. To prepare a whole GPU the driver does not query the hardware, so
// without this error the container would start without a GPU.
func (r *requests) refuseLost(v *nodeview.View, c *resourceapi.ResourceClaim) error {
	refusal := r.healthRefusal(v, c)
	if refusal == nil {
		return nil
	}
	if _, prepared, err := r.preparer.Records.Load(c.UID); err != nil || prepared {
		return nil //nolint:nilerr // the Preparer reports an unreadable record
	}
	return refusal
}

// healthRefusal returns an error that names the claim's first device that the health watcher
// reports as lost, or nil if none is lost.
func (r *requests) healthRefusal(v *nodeview.View, c *resourceapi.ResourceClaim) error {
	view := r.health.View()
	if view == nil || c.Status.Allocation == nil {
		return nil
	}
	for _, result := range c.Status.Allocation.Devices.Results {
		n, ok := device.ParseName(result.Device)
		if result.Driver != DriverName || !ok {
			continue
		}
		for _, g := range v.GPUs {
			if verdict := view.Of(g.GPU, n); g.WholeName() == n.GPU && verdict.State == health.Lost {
				return cause.Refusal(c.Namespace+"/"+c.Name, cause.Device,
					"request %s was allocated device %s, which cannot be prepared: %s", result.Request, result.Device, verdict.Message())
			}
		}
	}
	return nil
}
