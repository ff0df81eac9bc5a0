package driver

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// first writes the slices of a node that has none, and says whether it has written all of them. The slice controller looks for the first time a second after
// it was started, whatever there is to see (k8s.io/dynamic-resource-allocation v0.37, Controller.initInformer), and that is most of the time that a new node's
// GPUs would be unknown. It finds what it would have written, names included, and leaves it; what failed here it writes itself.
func (p *publisher) first(ctx context.Context, slices []resourceslice.Slice) (written bool, _ error) {
	api := p.client.ResourceV1().ResourceSlices()
	there, err := api.List(ctx, metav1.ListOptions{Limit: 1, FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver: DriverName, resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()})
	if err != nil || len(there.Items) > 0 {
		return false, err
	}
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.nodeName, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: ptr.To(true)}
	for i, s := range slices {
		_, err := api.Create(ctx, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{
				// The controller finds a slice again by its place in the pool, which begins its name.
				GenerateName:    fmt.Sprintf("%05x-%s-%s-", i, DriverName, p.nodeName),
				OwnerReferences: []metav1.OwnerReference{owner},
			},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: DriverName, NodeName: ptr.To(p.nodeName),
				Pool:    resourceapi.ResourcePool{Name: p.nodeName, Generation: 1, ResourceSliceCount: int64(len(slices))},
				Devices: s.Devices, SharedCounters: s.SharedCounters, PerDeviceNodeSelection: s.PerDeviceNodeSelection,
				PartitionTypeAttribute: s.PartitionTypeAttribute, SkipNodeOperations: s.SkipNodeOperations,
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return false, err
		}
	}
	klog.FromContext(ctx).Info("Published the first ResourceSlices of this node", "slices", len(slices))
	return true, nil
}
