package publish

import (
	"context"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/rollout"
)

// newRollout returns a rollout for a controller that starts with the returned slices.
//
// If published slices differ from the wanted ones only in taints, these are the published ones: an
// earlier plugin instance may have ended between the writes of two slices, and the rollout then
// writes the rest one by one. Otherwise these are the wanted ones.
func (p *Publisher) newRollout(
	ctx context.Context, wanted []resourceslice.Slice,
) (_ *rollout.Rollout, first []resourceslice.Slice) {
	earlier, err := p.adoptSlices(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Failed to list the ResourceSlices of an earlier instance; the controller will replace them", "err", err)
	}
	first = wanted
	published := len(earlier) > 0 && slices.EqualFunc(earlier, wanted, rollout.EqualExceptTaints)
	if published {
		first = earlier
	}
	r := rollout.New(first, published, time.Now())
	r.SetTarget(wanted)
	return r, first
}

// adoptSlices returns the slices that an earlier plugin instance published for this node. It
// returns none if they are not a complete pool, because the scheduler ignores incomplete pools.
func (p *Publisher) adoptSlices(ctx context.Context) ([]resourceslice.Slice, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stored, err := p.cluster.Slices(ctx)
	if err != nil {
		return nil, err
	}
	return completePool(stored), nil
}

// completePool returns the stored slices, sorted by index, or none if they are not one complete
// pool.
func completePool(stored []resourceapi.ResourceSlice) []resourceslice.Slice {
	// The name of each slice starts with its index in the pool.
	slices.SortFunc(stored, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	all := make([]resourceslice.Slice, len(stored))
	for i, t := range stored {
		if t.Spec.Pool != stored[0].Spec.Pool || t.Spec.Pool.ResourceSliceCount != int64(len(stored)) {
			return nil
		}
		all[i] = sliceOf(t.Spec)
	}
	return all
}

// sliceOf returns the fields of a published slice that the publisher chooses. The slice controller
// chooses driver, node and pool.
func sliceOf(s resourceapi.ResourceSliceSpec) resourceslice.Slice {
	return resourceslice.Slice{
		Devices: s.Devices, SharedCounters: s.SharedCounters, PerDeviceNodeSelection: s.PerDeviceNodeSelection,
		PartitionTypeAttribute: s.PartitionTypeAttribute, SkipNodeOperations: s.SkipNodeOperations,
	}
}
