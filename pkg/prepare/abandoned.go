package prepare

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// Abandoned says why a record holds what nobody uses, given the claim of that name as the API server has it, nil if it has none. It is empty for a claim
// that has its devices, and Pods that it is reserved for. idle says that the claim is only without Pods: the next one may have it at any time, so that it must
// not be given back while the kubelet knows it as prepared, who would not prepare it again.
func (p *Preparer) Abandoned(r checkpoint.Record, now *resourceapi.ResourceClaim) (why string, idle bool) {
	switch {
	case now == nil:
		return "it was deleted", false
	case now.UID != r.ClaimUID:
		return "it was deleted, and another claim has its name (UID " + string(now.UID) + ")", false
	case now.Status.Allocation == nil:
		return "it is not allocated any more", false
	}
	for _, d := range r.Devices {
		if !slices.ContainsFunc(now.Status.Allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
			return a.Driver == p.DriverName && a.Pool == d.Pool && a.Device == d.Device && a.Request == d.Request && same(a.ShareID, d.ShareID)
		}) {
			return "it is not allocated device " + d.Device + " any more", false
		}
	}
	if len(now.Status.ReservedFor) == 0 {
		return "it is not reserved for any Pod any more", true
	}
	return "", false
}

// GiveBack gives a claim's devices back although the kubelet has not asked for it. The last word has confirm, which is asked while no call works on the claim:
// its error keeps the claim. A claim that a call works on is left to that call. done says that something was given back.
func (p *Preparer) GiveBack(ctx context.Context, uid types.UID, confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error) {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	held, err := p.lock(waiting, uid)
	if err != nil {
		return false, nil // the call that works on it knows better
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	if err != nil || !found {
		return false, err
	}
	if err := confirm(ctx, r); err != nil {
		return false, err
	}
	if err := p.unprepareLocked(ctx, held, uid); err != nil {
		return false, about(r.Namespace+"/"+r.Name, err)
	}
	p.GivenBack(uid)
	return true, nil
}

// sweep removes what killed calls have left of claims that have no record: specs, locks, and files that were not finished. It is what Recover does at the
// start, for a plugin that runs on while others on its node are killed. A claim that a call works on is left alone.
func (p *Preparer) sweep(ctx context.Context) error {
	traces, err := p.traces()
	if err != nil {
		return err
	}
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var all together
	for _, uid := range traces {
		if !hasRecord(entries, uid) {
			all.do(func() error { return p.sweepClaim(ctx, uid) })
		}
	}
	return all.wait()
}

func (p *Preparer) sweepClaim(ctx context.Context, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	held, err := p.lock(waiting, uid) // its file goes with its last use
	if err != nil {
		return nil // the call that works on it knows better
	}
	defer held.Release()
	entries, err := p.Records.List()
	if err != nil || hasRecord(entries, uid) {
		return err
	}
	return p.removeTraces(ctx, uid)
}

// removeTraces removes what is left of a claim without a record. The caller holds the claim.
func (p *Preparer) removeTraces(ctx context.Context, uid types.UID) error {
	specified, err := p.Specs.Claims()
	if err != nil {
		return because(CauseStep, "%w", err)
	}
	unfinished, err := p.Records.Unfinished()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	if slices.Contains(unfinished, uid) {
		if err := p.Records.Discard(uid); err != nil {
			return because(CauseRecord, "%w", err)
		}
		p.repaired(ctx, Repair{"unfinished-write", "Removed the beginning of a record that a killed call left", string(uid)})
	}
	if !slices.Contains(specified, uid) {
		return nil
	}
	if err := p.Specs.RemoveClaim(uid); err != nil {
		return because(CauseStep, "%w", err)
	}
	p.repaired(ctx, Repair{"leftover-spec", "Removed the CDI spec of a claim that holds nothing on this node", string(uid)})
	return nil
}

// Holding is the record of a claim that is held.
func (p *Preparer) Holding(uid types.UID) (r checkpoint.Record, found bool, err error) {
	r, found, err = p.Records.Load(uid)
	if err != nil {
		return checkpoint.Record{}, found, because(CauseRecord, "%w", err)
	}
	return r, found, nil
}
