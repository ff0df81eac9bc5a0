package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Unprepare takes a claim's devices back. It needs the GPU driver only if one of the recorded steps
// changed hardware. If the claim has no record, it is already unprepared.
func (p *Preparer) Unprepare(ctx context.Context, uid types.UID) error {
	locks, err := p.LockClaim(ctx, uid)
	if err != nil {
		return cause.ForClaim("with UID "+string(uid), err)
	}
	defer locks.Release()
	if err := p.UnprepareLocked(ctx, locks, uid); err != nil {
		return cause.ForClaim("with UID "+string(uid), err)
	}
	p.opts.Observer.Unprepared(uid)
	return nil
}

func (p *Preparer) UnprepareLocked(ctx context.Context, locks *lock.Guard, uid types.UID) error {
	r, found, err := p.node.Records.Load(uid)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return p.quarantineRecord(ctx, uid, unreadable)
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case !found:
		if err := p.node.Specs.RemoveClaim(uid); err != nil {
			return cause.Wrap(cause.Step, err)
		}
		// Sync the directories: an earlier call may have removed the record and been killed before the
		// removal was durable.
		return cause.Wrap(cause.Record, p.node.Records.SyncDirs(true))
	}
	if err := LockGPUs(ctx, locks, r.GPUs()...); err != nil {
		return cause.Errorf(cause.Of(err), "of %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.Revert(ctx, r)
}

// Revert undoes the steps of record r and deletes the record. The caller holds the locks of the
// claim and of its GPUs.
func (p *Preparer) Revert(ctx context.Context, r checkpoint.Record) error {
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.undo(ctx, &r, list)
}

// undo reverts the steps and removes the record r. steps may have results that r lacks. Before undo
// destroys a MIG instance, it saves the state Reverting, but goes on if that fails, because a later
// call verifies the devices of a record in state Prepared.
func (p *Preparer) undo(ctx context.Context, r *checkpoint.Record, list []steps.Step) error {
	env := steps.NewEnv(p.node, r, list)
	if r.State == checkpoint.Prepared && steps.NeedsHardware(list) && !env.EarlierBoot {
		r.State = checkpoint.Reverting
		if err := env.Journal(); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to record that a claim is being unprepared; reverting anyway", "claim",
				klog.KRef(r.Namespace, r.Name))
		}
	}
	bound := slices.ContainsFunc(steps.Of[*steps.Passthrough](list), func(s *steps.Passthrough) bool { return s.Found != nil })
	work, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
	defer cancel()
	if err := steps.RevertAll(work, env, list); err != nil {
		return cause.OrStep(fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err))
	}
	if bound && !env.EarlierBoot {
		scanned, cancel := steps.WithTimeout(ctx, steps.ScanTime, steps.AnswerTime)
		defer cancel()
		p.opts.Rescan(scanned) // a claim that waits for the GPU would not find it
	}
	if err := p.node.Records.Remove(r.ClaimUID); err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	return nil
}
