package prepare

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// Abandoned says why a record holds what nobody uses. now is the claim of that name in the API
// server, nil if there is none. A claim that keeps its allocation is not abandoned, also while no
// Pod has it reserved: the scheduler gives its devices to nobody else.
func (p *Preparer) Abandoned(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string) {
	switch {
	case now == nil:
		return "it was deleted"
	case now.UID != r.ClaimUID:
		return "it was deleted, and another claim has its name (UID " + string(now.UID) + ")"
	case now.Status.Allocation == nil:
		return "it is not allocated any more"
	}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(now.Status.Allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
			return a.Driver == p.DriverName && a.Pool == d.Pool && a.Device == d.Device && a.Request == d.Request && same(a.ShareID, d.ShareID)
		}) {
			return "it is not allocated device " + d.Device + " any more"
		}
	}
	return ""
}

// GiveBack gives a claim's devices back although the kubelet has not asked for it. The last word has confirm, which is asked while no call works on the claim:
// its error keeps the claim. A claim that a call works on is left to that call. done says that something was given back.
func (p *Preparer) GiveBack(ctx context.Context, uid types.UID, confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error) {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	err = p.unlessBusy(waiting, uid, func(held *lock.Held) error {
		r, found, err := p.Records.Load(uid)
		if err != nil || !found {
			return err
		}
		if err := confirm(ctx, r); err != nil {
			return err
		}
		if err := p.unprepareLocked(ctx, held, uid); err != nil {
			return about(r.Namespace+"/"+r.Name, err)
		}
		p.GivenBack(uid)
		done = true
		return nil
	})
	return done, err
}

// Holding is the record of a claim that is held.
func (p *Preparer) Holding(uid types.UID) (r checkpoint.Record, found bool, err error) {
	r, found, err = p.Records.Load(uid)
	if err != nil {
		return checkpoint.Record{}, found, because(CauseRecord, "%w", err)
	}
	return r, found, nil
}
