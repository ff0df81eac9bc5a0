package prepare

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// recoverWait bounds how long Recover and Mend wait for a claim that another call works on: that call, or the kubelet's next one, finishes it.
const recoverWait = 2 * time.Second

// Recover puts the node in order at the start: unfinished preparations are reverted, specs of finished ones are written again, and specs, locks and
// temporary files without a record are removed. What cannot be read is reported and left: it keeps holding its GPUs until its claim is unprepared.
// One claim's failure stops no other.
func (p *Preparer) Recover(ctx context.Context) error {
	traces, err := p.traces()
	if err != nil {
		return err
	}
	for _, uid := range traces {
		if err := p.recoverClaim(ctx, uid); err != nil {
			klog.FromContext(ctx).Error(err, "Could not recover a claim; what it holds stays held until it is unprepared", "claimUID", uid)
		}
	}
	return nil
}

// traces are the claims that anything on the node reminds of.
func (p *Preparer) traces() ([]types.UID, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	uids, err := p.Records.Unfinished()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	for _, e := range entries {
		uids = append(uids, e.ClaimUID)
	}
	specified, err := p.Specs.Claims()
	if err != nil {
		return nil, because(CauseStep, "%w", err)
	}
	uids = append(uids, specified...)
	locks, err := p.Locks.Files()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	for _, file := range locks {
		if uid, ok := strings.CutPrefix(file, claimLockPrefix); ok {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

func (p *Preparer) recoverClaim(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	held, err := p.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer held.Release()
	if err := p.Records.Discard(uid); err != nil {
		return because(CauseRecord, "%w", err)
	}
	r, found, err := p.Records.Load(uid)
	switch {
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		return p.Specs.RemoveClaim(uid)
	case r.State != checkpoint.Prepared:
		if err := lockGPUs(ctx, held, r.GPUs()...); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Reverting a preparation that was interrupted", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid)
		return p.revert(ctx, r)
	}
	return p.rewrite(ctx, r)
}

// rewrite writes a prepared claim's spec again. After a reboot the record's edits may name other cards' device nodes: the kubelet prepares every claim
// again then, and Prepare looks.
func (p *Preparer) rewrite(ctx context.Context, r checkpoint.Record) error {
	if r.BootID != p.BootID {
		return nil
	}
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	for _, s := range steps {
		spec, ok := s.(*claimSpec)
		if !ok {
			continue
		}
		if err := p.rewriteSpec(ctx, r, spec); err != nil {
			return because(CauseStep, "claim %s/%s: %w", r.Namespace, r.Name, err)
		}
	}
	return nil
}

// rewriteSpec leaves no spec in place that would give a container another card than the one that the claim was prepared with: the next container of the
// claim then fails to start instead.
func (p *Preparer) rewriteSpec(ctx context.Context, r checkpoint.Record, spec *claimSpec) error {
	env := p.env(r.ClaimUID)
	snapshot := p.Hardware.Snapshot()
	if !snapshot.Ready {
		// The record's device nodes may be another card's since the driver was loaded anew. A spec that is there stays; one that is missing is
		// written when the node has been looked at.
		return nil
	}
	now := &claimSpec{}
	for _, d := range r.Devices {
		gpu, edits, known := find(snapshot, d.Device)
		switch {
		case !known:
			return spec.Apply(ctx, env)
		case gpu.UUID != d.GPUUUID:
			return errors.Join(replaced(d, gpu.UUID), spec.Revert(ctx, env))
		}
		now.add(specDevice{Name: cdi.ClaimDeviceName(r.ClaimUID, d.Device, d.ShareID), Edits: edits})
	}
	if err := p.update(r, now); err != nil {
		return err
	}
	return now.Apply(ctx, env)
}

// update has the record say what the claim's spec says now.
func (p *Preparer) update(r checkpoint.Record, now *claimSpec) error {
	stored, err := store([]Step{now})
	if err != nil {
		return err
	}
	changed := false
	steps := slices.Clone(r.Steps)
	for i, s := range steps {
		if s.Kind == claimSpecKind && !sameStep(s, stored[0]) {
			steps[i], changed = stored[0], true
		}
	}
	if !changed {
		return nil
	}
	r.Steps = steps
	return p.Records.Save(r)
}

// Mend writes the specs of all prepared claims again where they are missing or altered. The kubelet does not prepare again when a container restarts.
func (p *Preparer) Mend(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, p.mendClaim(ctx, e.ClaimUID))
	}
	return errors.Join(errs...)
}

func (p *Preparer) mendClaim(ctx context.Context, uid types.UID) error {
	// A claim that another call works on for long gets its spec from that call.
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	held, err := p.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	if err != nil || !found || r.State != checkpoint.Prepared {
		return err
	}
	return p.rewrite(ctx, r)
}
