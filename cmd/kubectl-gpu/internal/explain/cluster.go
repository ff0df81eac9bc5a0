package explain

import (
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// patience is how long the allocator may search on one node. The scheduler gives it ten seconds.
// remedyPatience is how long it may search with one remedy.
const (
	patience       = 2 * time.Second
	remedyPatience = 500 * time.Millisecond
)

// Explainer answers questions about one snapshot. It may be used by several goroutines.
type Explainer struct {
	s        *fleet.Snapshot
	features structured.Features
	cache    *cel.Cache
	// holders has the claims that hold each device, by driver and pool.
	holders map[pool]map[string][]fleet.Holder
	// local has the slices of one node, by node. shared has those of no single node.
	local  map[string][]*resourceapi.ResourceSlice
	shared []*resourceapi.ResourceSlice
	// used is what the Pods of each node request together.
	used map[string]corev1.ResourceList
	// extended finds the class that offers an extended resource.
	extended *extendedresourcecache.ExtendedResourceCache
}

type pool struct{ driver, name string }

// New returns an Explainer for the snapshot.
func New(s *fleet.Snapshot) *Explainer {
	e := &Explainer{
		s: s, features: s.Features(), cache: cel.NewCache(1000, cel.Features{}),
		holders: map[pool]map[string][]fleet.Holder{}, local: map[string][]*resourceapi.ResourceSlice{},
		used: map[string]corev1.ResourceList{}, extended: extendedresourcecache.NewExtendedResourceCache(klog.Background()),
	}
	for _, class := range s.Classes {
		e.extended.OnAdd(class, true)
	}
	for id, holders := range s.Holders() {
		p := pool{id.Driver, id.Pool}
		if e.holders[p] == nil {
			e.holders[p] = map[string][]fleet.Holder{}
		}
		e.holders[p][id.Device] = holders
	}
	for _, slice := range s.Slices {
		if node := ptr.Deref(slice.Spec.NodeName, ""); node != "" {
			e.local[node] = append(e.local[node], slice)
		} else {
			e.shared = append(e.shared, slice)
		}
	}
	for _, p := range s.Pods {
		if p.Spec.NodeName != "" && !fleet.Ended(p) {
			addTo(e.used, p.Spec.NodeName, podRequests(p))
		}
	}
	return e
}

func addTo(used map[string]corev1.ResourceList, node string, more corev1.ResourceList) {
	if used[node] == nil {
		used[node] = corev1.ResourceList{}
	}
	for name, q := range more {
		sum := used[node][name]
		sum.Add(q)
		used[node][name] = sum
	}
}

// podRequests returns what the Pod takes of its node: all that its containers request, and one Pod.
func podRequests(p *corev1.Pod) corev1.ResourceList {
	sum := resourcehelper.PodRequests(p, resourcehelper.PodResourcesOptions{})
	sum[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	return sum
}

// slicesFor returns the slices that the allocator needs for a node.
func (e *Explainer) slicesFor(node string) []*resourceapi.ResourceSlice {
	return slices.Concat(e.local[node], e.shared)
}

// state returns what claims hold in the pools of these slices, without the claims in freed.
func (e *Explainer) state(all []*resourceapi.ResourceSlice, s scenario) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	seen := map[pool]bool{}
	for _, slice := range all {
		p := pool{slice.Spec.Driver, slice.Spec.Pool.Name}
		if seen[p] {
			continue
		}
		seen[p] = true
		for name, holders := range e.holders[p] {
			id := structured.MakeDeviceID(p.driver, p.name, name)
			for _, h := range holders {
				switch {
				case s.freed[fleet.UID(h.Claim)]:
				case h.Result.ShareID == nil || !e.features.ConsumableCapacity:
					state.AllocatedDevices.Insert(id)
				default:
					state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, h.Result.ShareID))
					state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, h.Result.ConsumedCapacity))
				}
			}
		}
	}
	return state
}

// candidates returns the node's slices without those devices that no request matches, so that the
// allocator need not evaluate their selectors again. Devices that claims hold stay, because they
// consume counters. Slices of other drivers stay as they are, because the allocator checks them as
// a whole.
func (e *Explainer) candidates(node *corev1.Node, all []asked) []*resourceapi.ResourceSlice {
	matched := map[*resourceapi.Device]bool{}
	for _, a := range all {
		for _, f := range a.fates {
			if f.matches() || f.failure != nil {
				matched[f.device] = true
			}
		}
	}
	kept := slices.Clone(e.slicesFor(node.Name))
	for i, slice := range kept {
		if slice.Spec.Driver != device.DriverName {
			continue
		}
		fewer := *slice
		fewer.Spec.Devices = nil
		holders := e.holders[pool{slice.Spec.Driver, slice.Spec.Pool.Name}]
		for j := range slice.Spec.Devices {
			if d := &slice.Spec.Devices[j]; matched[d] || len(holders[d.Name]) > 0 {
				fewer.Spec.Devices = append(fewer.Spec.Devices, *d)
			}
		}
		kept[i] = &fewer
	}
	return kept
}

// errGaveUp means that the allocator found no answer in time.
var errGaveUp = errors.New("no answer in time")

// allocate runs the scheduler's allocator for one node. It returns nil without an error if the
// claims do not fit.
func (e *Explainer) allocate(ctx context.Context, node *corev1.Node, s scenario) ([]resourceapi.AllocationResult, error) {
	return e.allocateOf(ctx, node, e.slicesFor(node.Name), s)
}

// allocateOf is allocate with these slices instead of those of the node.
func (e *Explainer) allocateOf(
	ctx context.Context, node *corev1.Node, all []*resourceapi.ResourceSlice, s scenario,
) ([]resourceapi.AllocationResult, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a, err := structured.NewAllocator(ctx, e.features, e.state(all, s), e.s, all, e.cache)
	if err != nil {
		return nil, err
	}
	results, err := a.Allocate(ctx, node, s.claims)
	if ctx.Err() != nil {
		return nil, errGaveUp
	}
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return nil, nil
	}
	return results, err
}

// fits reports whether the Pod could run on the node.
func (e *Explainer) fits(ctx context.Context, q question, node *corev1.Node, s scenario) bool {
	for _, r := range e.nodeReasons(q, node) {
		if !s.opened[r.Code] {
			return false
		}
	}
	s.claims = withoutDevicePlugin(s.claims, node)
	if len(s.claims) == 0 {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, remedyPatience)
	defer cancel()
	results, err := e.allocate(ctx, node, s)
	return err == nil && len(results) == len(s.claims)
}

// fails reports whether the allocator returns an error for a node on which the Pod may run.
func (e *Explainer) fails(ctx context.Context, q question, s scenario) bool {
	return slices.ContainsFunc(e.s.Nodes, func(n *corev1.Node) bool {
		if len(e.nodeReasons(q, n)) > 0 {
			return false
		}
		s.claims = withoutDevicePlugin(s.claims, n)
		_, err := e.allocate(ctx, n, s)
		return err != nil && !errors.Is(err, errGaveUp)
	})
}
