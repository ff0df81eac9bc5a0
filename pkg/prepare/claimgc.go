package prepare

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// OrphanReason returns why the driver may unprepare the claim of record r without a call from the
// kubelet, or "" if it may not. The parameter "now" is the claim with r's name in the API server,
// or nil if there is none. An allocated claim is no orphan, even if no Pod reserves it.
func (p *Preparer) OrphanReason(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string) {
	switch {
	case now == nil:
		return "it was deleted"
	case now.UID != r.ClaimUID:
		return "it was deleted, and another claim now has its name (UID " + string(now.UID) + ")"
	case now.Status.Allocation == nil:
		return "it is no longer allocated"
	}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(now.Status.Allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
			return a.Driver == p.DriverName && a.Pool == d.Pool && a.Device == d.Device && a.Request == d.Request && equalPtr(a.ShareID, d.ShareID)
		}) {
			return "it is no longer allocated device " + d.Device
		}
	}
	return ""
}

// UnprepareOrphan unprepares a claim without a call from the kubelet. It does nothing if a call for
// the claim is running. It calls confirm under the claim's lock. If confirm returns an error, the
// claim stays prepared. done reports whether UnprepareOrphan unprepared the claim.
func (p *Preparer) UnprepareOrphan(ctx context.Context, uid types.UID,
	confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error) {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	err = p.runUnlessBusy(waiting, uid, func(locks *lock.Guard) error {
		r, found, err := p.Records.Load(uid)
		if err != nil || !found {
			return err
		}
		if err := confirm(ctx, r); err != nil {
			return err
		}
		if err := p.unprepareLocked(ctx, locks, uid); err != nil {
			return cause.ForClaim(r.Namespace+"/"+r.Name, err)
		}
		p.OnUnprepared(uid)
		done = true
		return nil
	})
	return done, err
}

// Record reads a claim's record. The record can be in any state.
func (p *Preparer) Record(uid types.UID) (r checkpoint.Record, found bool, err error) {
	r, found, err = p.Records.Load(uid)
	if err != nil {
		return checkpoint.Record{}, found, cause.Wrap(cause.Record, err)
	}
	return r, found, nil
}
