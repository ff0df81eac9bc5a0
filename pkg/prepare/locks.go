package prepare

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Every call locks a claim first and then its GPUs. A claim's lock is named by its UID, a GPU's by
// the GPU's name.
//
// An Unprepare that finds no record knows no GPUs. Without the claim's lock it would succeed while
// another instance prepares the claim, which no call would unprepare later.

// LockClaim locks a claim.
func (p *Preparer) LockClaim(ctx context.Context, uid types.UID) (*lock.Guard, error) {
	guard, err := p.opts.Locks.Acquire(ctx, string(uid))
	if err != nil {
		return nil, LockError("another call for the same claim is still running", err)
	}
	return guard, nil
}

// LockGPUs locks the GPUs for the caller who has the claim's lock.
func LockGPUs(ctx context.Context, guard *lock.Guard, gpus ...string) error {
	if err := guard.Add(ctx, gpus...); err != nil {
		return LockError("another claim is being prepared or unprepared on the same GPU", err)
	}
	return nil
}

// LockError adds a cause to err, an error of package lock. If another call has the lock, the error
// begins with waitedFor, which says what that call does. Otherwise the lock file itself failed.
func LockError(waitedFor string, err error) error {
	if IsBusy(err) {
		return cause.Errorf(cause.Canceled, "%s: %w", waitedFor, err)
	}
	return cause.Wrap(cause.Record, err)
}

// IsBusy reports whether err means that another call has the lock.
func IsBusy(err error) bool {
	busy := new(lock.BusyError)
	return errors.As(err, &busy)
}

// UnlessBusy runs work under the claim's lock and returns its error. If another call has the lock
// until the context waiting ends, it returns nil without running work, because that call takes care
// of the claim. If the lock file cannot be used, it returns an error.
func (p *Preparer) UnlessBusy(waiting context.Context, uid types.UID, work func(guard *lock.Guard) error) error {
	guard, err := p.LockClaim(waiting, uid)
	if IsBusy(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer guard.Release()
	return work(guard)
}

// WithLocks runs work under the locks of the claim and of its GPUs, so that no other call works on
// them at the same time.
func (p *Preparer) WithLocks(ctx context.Context, uid types.UID, gpus []string, work func(context.Context) error) error {
	locks, err := p.LockClaim(ctx, uid)
	if err == nil {
		defer locks.Release()
		err = LockGPUs(ctx, locks, gpus...)
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
