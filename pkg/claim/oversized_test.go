package claim

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const firstGPU, secondGPU = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"

// wholeMemory knows both GPUs, with 80Gi each.
func wholeMemory(name string) uint64 {
	if name == firstGPU || name == secondGPU {
		return 80 << 30
	}
	return 0
}

func ofMemory(amount string) *resourceapi.CapacityRequirements {
	return &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount)}}
}

func exactly(name, amount string) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}
	if amount != "" {
		r.Exactly.Capacity = ofMemory(amount)
	}
	return r
}

func result(request, name string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Driver: "gpu.nvidia.com", Pool: "node", Device: name, Request: request}
}

// Oversized must find requests for at most half of the memory of the whole GPU that they got.
func TestOversized(t *testing.T) {
	firstOf := resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "large", DeviceClassName: "gpu.nvidia.com", Capacity: ofMemory("60Gi")},
		{Name: "small", DeviceClassName: "small.example.com", Capacity: ofMemory("10Gi")},
	}}
	foreign, admin := result("gpu", firstGPU), result("gpu", firstGPU)
	foreign.Driver, admin.AdminAccess = "nic.example.com", ptr.To(true)
	type requests = []resourceapi.DeviceRequest
	type results = []resourceapi.DeviceRequestAllocationResult
	little, alternatives := requests{exactly("gpu", "4Gi")}, requests{firstOf}
	whole := results{result("gpu", firstGPU)}
	for name, c := range map[string]struct {
		requests requests
		results  results
		parts    []string // parts of the hint; nil if there must be none
	}{
		"asks for less than half":        {little, whole, []string{"gpu", "4Gi", firstGPU, "80Gi", "class gpu.nvidia.com"}},
		"asks for half":                  {requests{exactly("gpu", "40Gi")}, whole, []string{"40Gi"}},
		"asks for zero":                  {requests{exactly("gpu", "0")}, whole, []string{"asks for 0 of memory"}},
		"asks for more than half":        {requests{exactly("gpu", "40961Mi")}, whole, nil},
		"asks for more than int64 holds": {requests{exactly("gpu", "1e30")}, whole, nil},
		"names no amount":                {requests{exactly("gpu", "")}, whole, nil},
		"got the alternative that asks for little": {
			alternatives, results{result("gpu/small", firstGPU)}, []string{"gpu/small", "10Gi", "class small.example.com"},
		},
		"got the alternative that asks for much":   {alternatives, results{result("gpu/large", firstGPU)}, nil},
		"got an alternative that it does not have": {alternatives, results{result("gpu/other", firstGPU)}, nil},
		"got a device of an unknown request":       {little, results{result("extra", firstGPU)}, nil},
		"got a share":                              {little, results{result("gpu", firstGPU+"-share")}, nil},
		"got a partition":                          {little, results{result("gpu", firstGPU+"-mig-19-0")}, nil},
		"got an unknown GPU":                       {little, results{result("gpu", "gpu-0000-99-00-0")}, nil},
		"got a device of another driver":           {little, results{foreign}, nil},
		"has admin access":                         {little, results{admin}, nil},
		"got several":                              {little, append(whole, result("gpu", secondGPU)), []string{"1 more"}},
		"has one large and one small request": {
			requests{exactly("much", "80Gi"), exactly("little", "1Gi")},
			results{result("much", firstGPU), result("little", secondGPU)}, []string{"little", secondGPU},
		},
		"got a device without a name":      {little, results{result("gpu", "")}, nil},
		"is not allocated":                 {little, nil, nil},
		"has a request of an unknown form": {requests{{Name: "gpu"}}, whole, nil},
	} {
		t.Run(name, func(t *testing.T) {
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c", UID: "uid"}}
			claim.Spec.Devices.Requests = c.requests
			if c.results != nil {
				claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: c.results}}
			}
			found := Oversized(claim, "gpu.nvidia.com", wholeMemory)
			if (found != "") != (c.parts != nil) {
				t.Fatalf("found %q", found)
			}
			for _, part := range c.parts {
				if !strings.Contains(found, part) {
					t.Errorf("%q does not say %q", found, part)
				}
			}
		})
	}
}
