package publish

import (
	"fmt"
	"math"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// oversized describes a request for at most half of a GPU's memory that was allocated the whole
// GPU. Manifests for NVIDIA's DRA driver with its gate consumableShares expect a share for such a
// request.
type oversized struct {
	request, class, device string
	asked, has             resource.Quantity
	// more is how many other GPUs of the claim were allocated for such requests.
	more int
}

func (o oversized) String() string {
	others := ""
	if o.more > 0 {
		others = fmt.Sprintf(" (the same applies to %d more GPUs of the claim)", o.more)
	}
	return fmt.Sprintf("Request %s asks for %s of memory but got the whole GPU %s with %s%s: class %s gives whole GPUs",
		o.request, &o.asked, o.device, &o.has, others, o.class)
}

// findOversized returns the claim's first request for at most half of a GPU's memory that was
// allocated the whole GPU, or nil if there is none. gpus are the node's GPUs.
func findOversized(c *resourceapi.ResourceClaim, gpus []nvidia.GPU) *oversized {
	if c.Status.Allocation == nil {
		return nil
	}
	memory := map[string]uint64{}
	for _, g := range gpus {
		memory[g.WholeName()] = min(g.MemoryBytes, math.MaxInt64)
	}
	var first *oversized
	for _, r := range c.Status.Allocation.Devices.Results {
		name, ok := device.ParseName(r.Device)
		if r.Driver != device.DriverName || ptr.Deref(r.AdminAccess, false) || !ok || name.Share || name.Partition != nil {
			continue
		}
		has := int64(memory[r.Device]) //nolint:gosec // bounded above
		class, asked, ok := memoryRequest(c, r.Request)
		if !ok || has == 0 || asked.CmpInt64(has/2) > 0 {
			continue
		}
		if first != nil {
			first.more++
			continue
		}
		first = &oversized{
			request: r.Request, class: class, device: r.Device,
			asked: asked, has: *resource.NewQuantity(has, resource.BinarySI),
		}
	}
	return first
}

// memoryRequest finds the claim's request by its name in an allocation result ("request" or
// "request/subrequest"). It returns the request's DeviceClass and how much of the capacity "memory"
// it asks for. ok is false if there is no such request or it asks for no memory.
func memoryRequest(c *resourceapi.ResourceClaim, name string) (class string, asked resource.Quantity, ok bool) {
	of := func(class string, capacity *resourceapi.CapacityRequirements) (string, resource.Quantity, bool) {
		if capacity == nil {
			return "", resource.Quantity{}, false
		}
		asked, ok := capacity.Requests["memory"]
		return class, asked, ok
	}
	for _, r := range c.Spec.Devices.Requests {
		if r.Exactly != nil && r.Name == name {
			return of(r.Exactly.DeviceClassName, r.Exactly.Capacity)
		}
		for _, sub := range r.FirstAvailable {
			if r.Name+"/"+sub.Name == name {
				return of(sub.DeviceClassName, sub.Capacity)
			}
		}
	}
	return "", resource.Quantity{}, false
}

// OversizedHint returns a hint for users whose claim asks for at most half of a GPU's memory but
// got a whole GPU. For any other claim it returns "". gpus are the node's GPUs.
func (p *Publisher) OversizedHint(c *resourceapi.ResourceClaim, gpus []nvidia.GPU) string {
	o := findOversized(c, gpus)
	switch {
	case o == nil:
		return ""
	case p.OffersFractions():
		return o.String() + ". Class shared.gpu.nvidia.com gives a share with a limit of memory"
	default:
		return o.String() + ". This node offers no shares with a limit of memory; " +
			"the chart's value shares=fractions offers them in class shared.gpu.nvidia.com"
	}
}
