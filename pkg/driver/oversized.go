package driver

import (
	"fmt"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// oversizedHint returns a hint for users whose claim asks for at most half of a GPU's memory but
// got the whole GPU, as findOversized found. For a claim that is prepared already, it returns "".
// So the caller must call it before Prepare, which records the claim.
func (r *requests) oversizedHint(found string, claim types.UID) string {
	if record, known, err := r.preparer.Records.Load(claim); err != nil || known && record.State == checkpoint.Prepared {
		return ""
	}
	if r.publisher.OffersFractions() {
		return found + ". Class shared.gpu.nvidia.com gives a share with a limit of memory"
	}
	return found + ". This node offers no shares with a limit of memory; " +
		"the chart's value shares=[{kind: fractions}] offers them in class shared.gpu.nvidia.com"
}

// memoryRequest is a claim's request for an amount of memory.
type memoryRequest struct {
	class  string
	memory resource.Quantity
}

// findOversized describes the claim's first request for at most half of a GPU's memory that was
// allocated the whole GPU, or returns "". Manifests for NVIDIA's DRA driver with its gate
// consumableShares expect a share for such a request.
func findOversized(c *resourceapi.ResourceClaim, gpus []nvidia.GPU) string {
	asked := map[string]memoryRequest{} // by the request's name in an allocation result
	add := func(name, class string, capacity *resourceapi.CapacityRequirements) {
		if capacity == nil {
			return
		}
		if memory, ok := capacity.Requests["memory"]; ok {
			asked[name] = memoryRequest{class, memory}
		}
	}
	for _, request := range c.Spec.Devices.Requests {
		if request.Exactly != nil {
			add(request.Name, request.Exactly.DeviceClassName, request.Exactly.Capacity)
		}
		for _, sub := range request.FirstAvailable {
			add(request.Name+"/"+sub.Name, sub.DeviceClassName, sub.Capacity)
		}
	}
	if len(asked) == 0 || c.Status.Allocation == nil {
		return ""
	}
	hint, class, more := "", "", 0
	for _, result := range c.Status.Allocation.Devices.Results {
		request, ok := asked[result.Request]
		whole := slices.IndexFunc(gpus, func(g nvidia.GPU) bool { return g.WholeName() == result.Device })
		if !ok || whole < 0 || result.Driver != DriverName || ptr.Deref(result.AdminAccess, false) {
			continue
		}
		memory := int64(min(gpus[whole].MemoryBytes, math.MaxInt64))
		switch {
		case memory == 0 || request.memory.CmpInt64(memory/2) > 0:
		case hint != "":
			more++
		default:
			class = request.class
			hint = fmt.Sprintf("Request %s asks for %s of memory but got the whole GPU %s with %s",
				result.Request, &request.memory, result.Device, resource.NewQuantity(memory, resource.BinarySI))
		}
	}
	if hint == "" {
		return ""
	}
	if more > 0 {
		hint += fmt.Sprintf(" (the same applies to %d more GPUs of the claim)", more)
	}
	return fmt.Sprintf("%s: class %s gives whole GPUs", hint, class)
}
