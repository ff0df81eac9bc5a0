// Package reconcile makes records, hardware, CDI specs and MPS daemons agree, outside of the
// kubelet's calls: at the start of the plugin, regularly, and after changes.
//
// It never touches what a running call works on: it takes the same locks, and skips a claim whose
// lock is busy. It removes a MIG instance only if the records prove that this driver created it, or
// if the admin's policy asks for that.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Reconciler repairs what no call of the kubelet repairs.
type Reconciler struct {
	transaction *prepare.Preparer
	ledger      *ledger.Ledger
	node        steps.Node
	locks       *lock.Set
	observer    prepare.Observer
}

// New returns a Reconciler that works on the same node as p, with the same options.
func New(p *prepare.Preparer, o prepare.Options) *Reconciler {
	return &Reconciler{transaction: p, ledger: o.Ledger, node: o.Node, locks: o.Locks, observer: o.Observer}
}

// report logs a repair and tells the observer.
func (rec *Reconciler) report(ctx context.Context, kind, what, object string) {
	prepare.Repair{Kind: kind, What: what, Object: object}.Report(ctx, rec.observer)
}

const (
	// reconcileTime limits how long Reconcile waits for the GPUs of one claim, and how long it then
	// works on them.
	reconcileTime = 30 * time.Second
	// sharedCheckTime limits how long Reconcile examines and restores the shared settings of one
	// claim, because other claims wait for the GPU meanwhile. Without persistence mode each run of
	// nvidia-smi takes a second or two, and setting a time slice needs four runs.
	sharedCheckTime = 10 * time.Second
	// busyWait limits how long Reconcile waits for a lock while another call is running. That call, or
	// the kubelet's next one, takes care of the claim.
	busyWait = 2 * time.Second
	// tryWait limits the wait for a lock where the caller can skip a claim whose lock is busy.
	tryWait = 10 * time.Millisecond
)

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
func (rec *Reconciler) Reconcile(ctx context.Context) error {
	entries, err := rec.node.Records.List()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	rec.observer.Comparing()
	var all []func() error
	pass := new(steps.Pass)
	errs := make([]error, len(entries))
	for i, e := range entries {
		all = append(all, func() error {
			errs[i] = rec.reconcileClaim(ctx, pass, e.ClaimUID)
			return nil
		})
	}
	all = append(all, func() error { return rec.collectGarbage(ctx) }, func() error { return rec.clearStaleMarks(ctx) })
	err = inParallel(all)
	var lost []*prepare.LostError
	unclear := map[types.UID]bool{}
	for i, e := range entries {
		lost = append(lost, LostDevices(errs[i])...)
		unclear[e.ClaimUID] = errs[i] != nil
		if errors.Is(errs[i], prepare.ErrNotChecked) {
			errs[i] = nil // it is no sign that something is wrong
		}
	}
	rec.observer.Compared(lost, unclear)
	return errors.Join(errors.Join(errs...), err)
}

// reconcileClaim returns [prepare.ErrNotChecked] if it could not examine the claim's devices.
func (rec *Reconciler) reconcileClaim(ctx context.Context, pass *steps.Pass, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, busyWait)
	defer cancel()
	err := prepare.ErrNotChecked // stays so if another call has the claim's lock
	if lockErr := rec.transaction.UnlessBusy(waiting, uid, func(locks *lock.Guard) error {
		err = rec.reconcileLocked(ctx, pass, locks, uid)
		return nil
	}); lockErr != nil {
		return lockErr
	}
	return err
}

func (rec *Reconciler) reconcileLocked(ctx context.Context, pass *steps.Pass, locks *lock.Guard, uid types.UID) error {
	r, found, err := rec.node.Records.Load(uid)
	var unreadable *statefile.UnreadableError
	if errors.As(err, &unreadable) {
		return cause.Errorf(cause.Record, "claim with UID %s: its devices stay in use until it is unprepared: %w", uid, err)
	}
	if err != nil {
		return cause.Errorf(cause.Record, "claim with UID %s: its devices stay in use: %w", uid, err)
	}
	if !found {
		return nil
	}
	most := reconcileTime
	if r.State == checkpoint.Prepared {
		err := rec.transaction.RewriteSpec(ctx, r)
		missing := errors.Is(err, prepare.ErrNotInInventory)
		if !missing && !steps.HasShared(r) {
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
	if err := prepare.LockGPUs(queued, locks, r.GPUs()...); err != nil {
		return fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	work, cancelWork := context.WithTimeoutCause(ctx, most, fmt.Errorf("not done within %s", most))
	defer cancelWork()
	if r.State == checkpoint.Prepared {
		return rec.transaction.Restore(work, pass, r)
	}
	klog.FromContext(ctx).Info("Rolling back incomplete claim", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid, "state", r.State)
	reverting, cancelReverting := context.WithTimeout(work, steps.PeriodicTime+steps.AnswerTime)
	defer cancelReverting()
	if err := rec.transaction.Revert(reverting, r); err != nil {
		return err
	}
	what := "Rolled back interrupted preparation"
	if r.State == checkpoint.Reverting {
		what = "Finished interrupted unpreparation"
	}
	rec.report(ctx, "interrupted-claim", what, r.Namespace+"/"+r.Name)
	return nil
}
