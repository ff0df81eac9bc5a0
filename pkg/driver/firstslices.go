package driver

import (
	"context"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish"
)

// publishFirst returns the slices that the slice controller must start with. published is true if
// these slices are already in the API server.
//
// On a new node publishFirst creates the wanted slices itself, because the controller would write
// its first slice only a second after its start (k8s.io/dynamic-resource-allocation v0.37,
// Controller.initInformer). The slices have the names that the controller would give them, so it
// leaves them as they are. The controller writes any slice that publishFirst failed to create.
//
// If published slices differ from the wanted ones only in taints, publishFirst returns the
// published ones. An earlier plugin instance may have ended between the writes of two slices, and
// [sliceRollout] then writes the rest one by one.
func (p *publisher) publishFirst(
	ctx context.Context, wanted []resourceslice.Slice,
) (first []resourceslice.Slice, published bool, _ error) {
	stored, err := p.listSlices(ctx)
	if err != nil {
		return wanted, false, err
	}
	if len(stored) > 0 {
		if first, same := equalExceptTaints(stored, wanted); same {
			return first, true, nil
		}
		return wanted, false, nil
	}
	if err := p.createSlices(ctx, wanted); err != nil {
		return wanted, false, err
	}
	klog.FromContext(ctx).Info("Published the first ResourceSlices of this node", "slices", len(wanted))
	return wanted, true, nil
}

// listSlices returns this node's slices from the API server.
func (p *publisher) listSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	return publish.APIServer{Client: p.client, Driver: DriverName, Node: p.nodeName}.Slices(ctx)
}

// adoptSlices returns the slices that an earlier plugin instance published for this node. It
// returns none if they are not a complete pool, because the scheduler ignores incomplete pools.
func (p *publisher) adoptSlices(ctx context.Context) ([]resourceslice.Slice, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stored, err := p.listSlices(ctx)
	if err != nil {
		return nil, err
	}
	adopted, _ := completePool(stored)
	return adopted, nil
}

// adoptedOffer returns a lastOffer with the slices of an earlier plugin instance, for a node that
// is not ready. If there are no such slices, the result's field valid is false.
func adoptedOffer(adopted []resourceslice.Slice, f Features) (lastOffer, error) {
	encoded, err := encodeSlices(adopted)
	return lastOffer{valid: len(adopted) > 0, slices: encoded, features: f, settled: true}, err
}

// completePool returns the stored slices, sorted by index. complete is false if they are not one
// complete pool.
func completePool(stored []resourceapi.ResourceSlice) (_ []resourceslice.Slice, complete bool) {
	// The name of each slice starts with its index in the pool.
	slices.SortFunc(stored, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	all := make([]resourceslice.Slice, len(stored))
	for i, t := range stored {
		if t.Spec.Pool != stored[0].Spec.Pool || t.Spec.Pool.ResourceSliceCount != int64(len(stored)) {
			return nil, false
		}
		all[i] = sliceOf(t.Spec)
	}
	return all, true
}

// equalExceptTaints compares stored slices with wanted ones. same is true if the stored slices are
// one complete pool that differs from wanted only in taints. Then it returns the stored slices,
// sorted.
func equalExceptTaints(stored []resourceapi.ResourceSlice, wanted []resourceslice.Slice) (_ []resourceslice.Slice, same bool) {
	published, complete := completePool(stored)
	if !complete || len(published) != len(wanted) {
		return nil, false
	}
	for i := range wanted {
		if !apiequality.Semantic.DeepEqual(withoutTaints(published[i]), withoutTaints(wanted[i])) {
			return nil, false
		}
	}
	return published, true
}

// createSlices creates the wanted slices with the names, owner and pool that the slice controller
// would give them.
func (p *publisher) createSlices(ctx context.Context, wanted []resourceslice.Slice) error {
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.nodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: ptr.To(true)}
	for i, s := range wanted {
		spec := specOf(s)
		spec.Driver, spec.NodeName = DriverName, ptr.To(p.nodeName)
		spec.Pool = resourceapi.ResourcePool{Name: p.nodeName, Generation: 1, ResourceSliceCount: int64(len(wanted))}
		_, err := p.client.ResourceV1().ResourceSlices().Create(ctx, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{
				// The slice controller recognizes a slice by its index in the pool, with which the name starts.
				GenerateName:    fmt.Sprintf("%05x-%s-%s-", i, DriverName, p.nodeName),
				OwnerReferences: []metav1.OwnerReference{owner},
			},
			Spec: spec,
		}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	return nil
}
