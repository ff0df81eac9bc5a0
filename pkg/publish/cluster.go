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

// claimsPage is how many claims the API server is asked for at once.
const claimsPage = 500

// APIServer is a [Cluster] as its API server shows it.
type APIServer struct {
	Client kubernetes.Interface
	// Driver and Node name the pool.
	Driver, Node string
}

var _ Cluster = APIServer{}

// Slices are those of the node's pool.
func (a APIServer) Slices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := a.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver: a.Driver, resourceapi.ResourceSliceSelectorNodeName: a.Node,
	}.String()})
	if err != nil {
		return nil, fmt.Errorf("list the node's ResourceSlices: %w", err)
	}
	return list.Items, nil
}

// Allocated goes through all claims of the cluster, since none can be selected by node.
func (a APIServer) Allocated(ctx context.Context) (Holders, error) {
	held := Holders{Alone: map[string]string{}, Shares: map[string]bool{}}
	page := metav1.ListOptions{Limit: claimsPage}
	for {
		list, err := a.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, page)
		if err != nil {
			return Holders{}, fmt.Errorf("list the ResourceClaims: %w", err)
		}
		for i := range list.Items {
			a.add(held, &list.Items[i])
		}
		if page.Continue = list.Continue; page.Continue == "" {
			return held, nil
		}
	}
}

func (a APIServer) add(held Holders, c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != a.Driver || r.Pool != a.Node || ptr.Deref(r.AdminAccess, false) {
			continue
		}
		if name, ok := device.ParseName(r.Device); ok && name.Share {
			_, held.Shares[r.Device] = r.ConsumedCapacity[device.CapacityMemory]
			continue
		}
		held.Alone[r.Device] = c.Namespace + "/" + c.Name
	}
}
