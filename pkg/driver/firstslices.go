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

// first says what the slice controller begins with, given what is wanted, and whether that is what the API server has.
//
// A node that has no slices gets them here: the controller looks for the first time a second after it was started, whatever there is to see
// (k8s.io/dynamic-resource-allocation v0.37, Controller.initInformer), and that is most of the time that a new node's GPUs would be unknown. It finds what it
// would have written, names included, and leaves it; what failed here it writes itself.
//
// Where only taints differ from what an earlier instance has published, which may have ended between two of its writes, the controller begins with that: see [stages].
func (p *publisher) first(ctx context.Context, wanted []resourceslice.Slice) (given []resourceslice.Slice, published bool, _ error) {
	there, err := p.there(ctx)
	if err != nil {
		return wanted, false, err
	}
	if len(there) > 0 {
		if given, same := butTaints(there, wanted); same {
			return given, true, nil
		}
		return wanted, false, nil
	}
	if err := p.create(ctx, wanted); err != nil {
		return wanted, false, err
	}
	klog.FromContext(ctx).Info("Published the first ResourceSlices of this node", "slices", len(wanted))
	return wanted, true, nil
}

// there are the node's slices in the API server.
func (p *publisher) there(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	return publish.APIServer{Client: p.client, Driver: DriverName, Node: p.nodeName}.Slices(ctx)
}

// adopt has the slices that an earlier instance has published. It has none where they are no complete
// pool: the scheduler gives nothing of such a pool.
func (p *publisher) adopt(ctx context.Context) ([]resourceslice.Slice, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	there, err := p.there(ctx)
	if err != nil {
		return nil, err
	}
	adopted, _ := completePool(there)
	return adopted, nil
}

// adoptedBasis is what a node that is not ready goes on offering. Without slices there is none.
func adoptedBasis(adopted []resourceslice.Slice, f Features) (basis, error) {
	kept, err := keep(adopted)
	return basis{made: len(adopted) > 0, slices: kept, features: f, settled: true}, err
}

// completePool are slices as they are in the API server, in order, if they are one complete pool.
func completePool(there []resourceapi.ResourceSlice) (_ []resourceslice.Slice, complete bool) {
	// The place in the pool begins the name.
	slices.SortFunc(there, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	all := make([]resourceslice.Slice, len(there))
	for i, t := range there {
		if t.Spec.Pool != there[0].Spec.Pool || t.Spec.Pool.ResourceSliceCount != int64(len(there)) {
			return nil, false
		}
		all[i] = sliceOf(t.Spec)
	}
	return all, true
}

// butTaints are the slices as they are in the API server, and whether they are one complete pool
// that is the same as what is wanted but for taints.
func butTaints(there []resourceapi.ResourceSlice, wanted []resourceslice.Slice) (_ []resourceslice.Slice, same bool) {
	given, complete := completePool(there)
	if !complete || len(given) != len(wanted) {
		return nil, false
	}
	for i := range wanted {
		if !apiequality.Semantic.DeepEqual(untainted(given[i]), untainted(wanted[i])) {
			return nil, false
		}
	}
	return given, true
}

// create writes slices as the controller would.
func (p *publisher) create(ctx context.Context, wanted []resourceslice.Slice) error {
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
				// The controller finds a slice again by its place in the pool, which begins its name.
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
