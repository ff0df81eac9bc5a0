package publish

import (
	"maps"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func claimOf(name string, results ...resourceapi.DeviceRequestAllocationResult) resourceapi.ResourceClaim {
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
	if len(results) > 0 {
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	}
	return c
}

func TestAllocationsReadsEveryPageOfThisPool(t *testing.T) {
	const share = gpuName + "-share"
	result := func(driver, pool, name string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Driver: driver, Pool: pool, Device: name}
	}
	admin := result("gpu.nvidia.com", "node", otherName)
	admin.AdminAccess = ptr.To(true)
	fraction := result("gpu.nvidia.com", "node", share)
	fraction.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{device.CapacityMemory: resource.MustParse("1Gi")}
	pages := map[string]*resourceapi.ResourceClaimList{
		"": {ListMeta: metav1.ListMeta{Continue: "second"}, Items: []resourceapi.ResourceClaim{
			claimOf("whole", result("gpu.nvidia.com", "node", gpuName)),
		}},
		"second": {ListMeta: metav1.ListMeta{Continue: "third"}, Items: []resourceapi.ResourceClaim{claimOf("pending"), claimOf("admin", admin)}},
		"third": {Items: []resourceapi.ResourceClaim{
			claimOf("two", result("gpu.nvidia.com", "node", small), fraction),
			claimOf("elsewhere", result("gpu.nvidia.com", "another", large), result("tpu.example.com", "node", large)),
		}},
	}
	client := fake.NewClientset()
	var asked []string
	client.PrependReactor("list", "resourceclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		options := a.(clienttesting.ListActionImpl).GetListOptions()
		asked = append(asked, options.Continue)
		if options.Limit != claimsPageSize {
			t.Errorf("a page of %d claims", options.Limit)
		}
		return true, pages[options.Continue], nil
	})
	got, err := APIServer{Client: client, Node: "node"}.Allocations(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"", "second", "third"}; !slices.Equal(asked, want) {
		t.Errorf("asked for the pages %q", asked)
	}
	if want := map[string]string{gpuName: "team/whole", small: "team/two"}; !maps.Equal(got.Exclusive, want) {
		t.Errorf("exclusive devices: %v", got.Exclusive)
	}
	if want := map[string]bool{share: true}; !maps.Equal(got.Shared, want) {
		t.Errorf("shared devices: %v", got.Shared)
	}
}
