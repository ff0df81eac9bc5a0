package prepare

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// Unprepare gives a claim's devices back. It needs no hardware that the record's steps do not need, and no GPU driver. A claim without a record is given
// back already.
func (p *Preparer) Unprepare(ctx context.Context, uid types.UID) error {
	held, err := p.lock(ctx, uid)
	if err != nil {
		return about("with UID "+string(uid), err)
	}
	defer held.Release()
	if err := p.unprepareLocked(ctx, held, uid); err != nil {
		return about("with UID "+string(uid), err)
	}
	p.GivenBack(uid)
	return nil
}

func (p *Preparer) unprepareLocked(ctx context.Context, held *lock.Held, uid types.UID) error {
	r, found, err := p.Records.Load(uid)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return p.setAside(ctx, uid, unreadable)
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		if err := p.Specs.RemoveClaim(uid); err != nil {
			return because(CauseStep, "%w", err)
		}
		// No record now is no record on the disk yet: an earlier call may have been killed in between.
		if err := p.Records.Settle(true); err != nil {
			return because(CauseRecord, "%w", err)
		}
		return nil
	}
	if err := lockGPUs(ctx, held, r.GPUs()...); err != nil {
		return because(CauseOf(err), "of %s/%s: %w", r.Namespace, r.Name, err)
	}
	return p.revert(ctx, r)
}

// Locked does work that is about a claim and GPUs and that no record tells of, while no call works on them.
func (p *Preparer) Locked(ctx context.Context, uid types.UID, gpus []string, work func(context.Context) error) error {
	held, err := p.lock(ctx, uid)
	if err == nil {
		defer held.Release()
		err = lockGPUs(ctx, held, gpus...)
	}
	if err == nil {
		bounded, cancel := within(ctx, destroyTime, answerTime)
		defer cancel()
		err = work(bounded)
	}
	if err != nil {
		return about("with UID "+string(uid), stepError(err))
	}
	return nil
}
