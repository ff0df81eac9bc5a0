package prepare

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Unprepare takes a claim's devices back. It needs the GPU driver only if one of the recorded steps
// changed hardware. If the claim has no record, it is already unprepared.
func (p *Preparer) Unprepare(ctx context.Context, uid types.UID) error {
	locks, err := p.lockClaim(ctx, uid)
	if err != nil {
		return cause.ForClaim("with UID "+string(uid), err)
	}
	defer locks.Release()
	if err := p.unprepareLocked(ctx, locks, uid); err != nil {
		return cause.ForClaim("with UID "+string(uid), err)
	}
	p.OnUnprepared(uid)
	return nil
}

func (p *Preparer) unprepareLocked(ctx context.Context, locks *lock.Guard, uid types.UID) error {
	r, found, err := p.Records.Load(uid)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return p.quarantineRecord(ctx, uid, unreadable)
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case !found:
		if err := p.Specs.RemoveClaim(uid); err != nil {
			return cause.Wrap(cause.Step, err)
		}
		// Sync the directories: an earlier call may have removed the record and been killed before the
		// removal was durable.
		if err := p.Records.SyncDirs(true); err != nil {
			return cause.Wrap(cause.Record, err)
		}
		return nil
	}
	if err := lockGPUs(ctx, locks, r.GPUs()...); err != nil {
		return cause.Errorf(cause.Of(err), "of %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.revert(ctx, r)
}

// WithLocks runs work under the locks of the claim and of its GPUs, so that no other call works on
// them at the same time.
func (p *Preparer) WithLocks(ctx context.Context, uid types.UID, gpus []string, work func(context.Context) error) error {
	locks, err := p.lockClaim(ctx, uid)
	if err == nil {
		defer locks.Release()
		err = lockGPUs(ctx, locks, gpus...)
	}
	if err == nil {
		bounded, cancel := steps.WithTimeout(ctx, steps.DestroyTime, steps.AnswerTime)
		defer cancel()
		err = work(bounded)
	}
	if err != nil {
		return cause.ForClaim("with UID "+string(uid), cause.OrStep(err))
	}
	return nil
}
