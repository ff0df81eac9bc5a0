package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

const (
	// reconcileTime limits how long Reconcile waits for the GPUs of one claim, and how long it then
	// works on them.
	reconcileTime = 30 * time.Second
	// sharedCheckTime limits how long Reconcile examines and restores the shared settings of one
	// claim, because other claims wait for the GPU meanwhile. Without persistence mode each run of
	// nvidia-smi takes a second or two, and setting a time slice needs four runs.
	sharedCheckTime = 10 * time.Second
)

// errNotChecked means that Reconcile did not examine a claim's devices, for example because another
// call had the lock. It is no sign that something is wrong with them.
var errNotChecked = errors.New("the claim's devices were not checked")

// Reconcile makes hardware and records agree, for every claim for which no call is running. It
// reverts unfinished preparations, finishes interrupted unpreparations and recreates lost
// partitions at their placements. If a partition cannot be recreated, Reconcile removes the claim's
// CDI spec, so that no container starts with another device. It then returns an error that names
// the lost device: see [LostDevices].
//
// It also checks and restores the settings and MPS daemons that claims share, which the inventory
// does not show.
//
// It handles claims concurrently, so a hung GPU delays no claim on another GPU. It reads a GPU only
// if the inventory lacks one of its partitions or claims share the GPU.
func (p *Preparer) Reconcile(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	var all parallel
	pass := steps.NewPass()
	for _, e := range entries {
		all.start(func() error { return withClaim(e.ClaimUID, p.reconcileClaim(ctx, pass, e.ClaimUID)) })
	}
	all.start(func() error { return withClaim("", p.collectGarbage(ctx)) })
	all.start(func() error { return withClaim("", p.clearStaleMarks(ctx)) })
	return all.wait()
}

func (p *Preparer) reconcileClaim(ctx context.Context, pass *steps.Pass, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	err := errNotChecked // stays so if another call has the claim's lock
	if lockErr := p.runUnlessBusy(waiting, uid, func(locks *lock.Guard) error {
		err = p.reconcileLocked(ctx, pass, locks, uid)
		return nil
	}); lockErr != nil {
		return lockErr
	}
	if errors.Is(err, errNotChecked) {
		p.OnSkipped(uid)
		return nil
	}
	return err
}

func (p *Preparer) reconcileLocked(ctx context.Context, pass *steps.Pass, locks *lock.Guard, uid types.UID) error {
	r, found, err := p.Records.Load(uid)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return errNotChecked // Recover has reported the record, which stays until the claim is unprepared
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case !found:
		return nil
	}
	most := reconcileTime
	if r.State == checkpoint.Prepared {
		err := p.rewriteSpec(ctx, r, p.checkInventory)
		missing := errors.Is(err, errNotInInventory)
		if !missing && !hasSharedSteps(r) {
			return err
		}
		if !missing {
			most = sharedCheckTime
		}
	}
	// Limit the wait for the locks of the GPUs, since each claim ahead of this one may work on a GPU
	// for up to reconcileTime.
	queued, cancelQueued := context.WithTimeout(ctx, reconcileTime)
	defer cancelQueued()
	if err := lockGPUs(queued, locks, r.GPUs()...); err != nil {
		return fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	work, cancelWork := context.WithTimeoutCause(ctx, most, fmt.Errorf("not done within %s", most))
	defer cancelWork()
	if r.State == checkpoint.Prepared {
		return p.rewriteSpec(work, r, p.restoreAllIn(pass))
	}
	klog.FromContext(ctx).Info("Rolling back incomplete claim", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid, "state", r.State)
	reverting, cancelReverting := context.WithTimeout(work, steps.PeriodicTime+steps.AnswerTime)
	defer cancelReverting()
	if err := p.revert(reverting, r); err != nil {
		return err
	}
	p.reportInterrupted(ctx, r)
	return nil
}
