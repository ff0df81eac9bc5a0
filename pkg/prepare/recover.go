package prepare

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// recoverWait bounds how long the start waits for a claim that another instance works on: that instance, or the kubelet's next call, finishes it.
const recoverWait = 2 * time.Second

// Recover puts the node in order at the start: unfinished preparations are reverted, specs of finished ones are written again, specs without a record
// removed. What cannot be read is reported and left: it keeps holding its GPUs until its claim is unprepared. One claim's failure stops no other.
func (p *Preparer) Recover(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	for _, e := range entries {
		if err := p.recoverClaim(ctx, e.ClaimUID); err != nil {
			klog.FromContext(ctx).Error(err, "Could not recover a claim; its GPUs stay held until it is unprepared", "claimUID", e.ClaimUID, "gpus", e.GPUs)
		}
	}
	stray, err := p.Specs.Claims()
	if err != nil {
		return because(CauseStep, "%w", err)
	}
	for _, uid := range stray {
		if slices.ContainsFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == uid }) {
			continue
		}
		if err := p.recoverClaim(ctx, uid); err != nil {
			klog.FromContext(ctx).Error(err, "Could not remove the spec of a claim that is not held", "claimUID", uid)
		}
	}
	return nil
}

func (p *Preparer) recoverClaim(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	held, err := p.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	switch {
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		return p.Specs.RemoveClaim(uid)
	case r.State != checkpoint.Prepared:
		if err := lockGPUs(ctx, held, r.Holds()...); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Reverting a preparation that was interrupted", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid)
		return p.revert(ctx, r)
	}
	return p.rewrite(ctx, r)
}

// rewrite writes a prepared claim's spec as the record has it. After a reboot the record's edits may name other cards' device nodes: the kubelet prepares
// every claim again then, and Prepare looks.
func (p *Preparer) rewrite(ctx context.Context, r checkpoint.Record) error {
	if r.BootID != p.BootID {
		return nil
	}
	steps, err := restore(r.Steps)
	if err != nil {
		return because(CauseRecord, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	for _, s := range steps {
		if spec, ok := s.(*claimSpec); ok {
			if err := spec.Apply(ctx, p.env(r.ClaimUID)); err != nil {
				return because(CauseStep, "claim %s/%s: %w", r.Namespace, r.Name, err)
			}
		}
	}
	return nil
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
