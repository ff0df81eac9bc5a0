package publish

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// claimsPageSize is the number of claims that one list call asks for.
const claimsPageSize = 500

// APIServer implements [Cluster] with the Kubernetes API.
type APIServer struct {
	Client kubernetes.Interface
	// Node is the node's name, and that of its pool of devices.
	Node string
}

var _ Cluster = APIServer{}

// Slices lists the ResourceSlices of the node's pool.
func (a APIServer) Slices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := a.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver: device.DriverName, resourceapi.ResourceSliceSelectorNodeName: a.Node,
	}.String()})
	if err != nil {
		return nil, fmt.Errorf("list the node's ResourceSlices: %w", err)
	}
	return list.Items, nil
}

// Allocations returns the node's devices that are allocated to claims. It reads every claim of the
// cluster, because the API cannot select claims by node.
func (a APIServer) Allocations(ctx context.Context) (device.Allocations, error) {
	found := device.Allocations{Exclusive: map[string]string{}, Shared: map[string]bool{}}
	page := metav1.ListOptions{Limit: claimsPageSize}
	for {
		list, err := a.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, page)
		if err != nil {
			return device.Allocations{}, fmt.Errorf("list the ResourceClaims: %w", err)
		}
		for i := range list.Items {
			a.addClaim(found, &list.Items[i])
		}
		if page.Continue = list.Continue; page.Continue == "" {
			return found, nil
		}
	}
}

func (a APIServer) addClaim(found device.Allocations, c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != device.DriverName || r.Pool != a.Node || ptr.Deref(r.AdminAccess, false) {
			continue
		}
		if name, ok := device.ParseName(r.Device); ok && name.Share {
			_, found.Shared[r.Device] = r.ConsumedCapacity[device.CapacityMemory]
			continue
		}
		found.Exclusive[r.Device] = c.Namespace + "/" + c.Name
	}
}
