package reconcile

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// recoverWait limits how long Recover and Reconcile wait for the lock of a claim for which a call
// is running. That call, or the kubelet's next one, takes care of the claim.
const recoverWait = 2 * time.Second

// tryWait limits the wait for a lock where the caller can skip a claim whose lock is busy.
const tryWait = 10 * time.Millisecond

// Recover repairs the node when the plugin starts. It reverts unfinished preparations, rewrites the
// CDI specs of prepared claims, and removes specs and temporary files without a record. It logs
// unreadable records and leaves them: they block their devices until the claim is unprepared. If
// one claim fails or is busy, Recover still repairs the others without delay.
func (rec *Reconciler) Recover(ctx context.Context) error {
	traces, err := rec.findTraces()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, uid := range traces {
		wg.Go(func() {
			if err := rec.recoverClaim(ctx, uid); err != nil {
				klog.FromContext(ctx).Error(err, "Failed to recover claim; its devices stay in use until it is unprepared", "claimUID", uid)
			}
		})
	}
	wg.Wait()
	return nil
}

// findTraces returns the claims that have a record, an unfinished record file or a CDI spec on the
// node. If it also returns an error, the list is incomplete.
func (rec *Reconciler) findTraces() (uids []types.UID, _ error) {
	var errs []error
	entries, err := rec.node.Records.List()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Record, err))
	}
	for _, e := range entries {
		uids = append(uids, e.ClaimUID)
	}
	unfinished, err := rec.node.Records.Unfinished()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Record, err))
	}
	specified, err := rec.node.Specs.Claims()
	if err != nil {
		errs = append(errs, cause.Wrap(cause.Step, err))
	}
	uids = slices.Concat(uids, unfinished, specified)
	slices.Sort(uids)
	return slices.Compact(uids), errors.Join(errs...)
}

func (rec *Reconciler) recoverClaim(ctx context.Context, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	locks, err := rec.transaction.LockClaim(ctx, uid)
	if err != nil {
		return err
	}
	defer locks.Release()
	r, found, err := rec.node.Records.Load(uid)
	if err == nil && !found {
		return rec.removeTraces(ctx, uid)
	}
	if derr := rec.node.Records.DiscardUnfinished(uid); derr != nil {
		return cause.Wrap(cause.Record, derr)
	}
	switch {
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case r.State != checkpoint.Prepared:
		return rec.recoverUnfinished(ctx, locks, r)
	}
	if err := rec.transaction.RewriteSpec(ctx, r); !errors.Is(err, prepare.ErrNotInInventory) && !errors.Is(err, prepare.ErrNotChecked) {
		return err
	}
	return nil
}

// recoverUnfinished undoes a claim's unfinished preparation or unpreparation at once if that needs
// no hardware. Otherwise it removes the claim's CDI spec and leaves the rest to Reconcile, so that
// the plugin's start does not wait for a GPU.
func (rec *Reconciler) recoverUnfinished(ctx context.Context, locks *lock.Guard, r checkpoint.Record) error {
	if err := prepare.LockGPUs(ctx, locks, r.GPUs()...); err != nil {
		return err
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(r.Namespace, r.Name), "claimUID", r.ClaimUID)
	list, err := steps.Decode(r.Steps)
	if err != nil {
		return cause.Errorf(cause.Record, "claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if steps.NeedsHardware(list) && r.BootID == rec.node.BootID {
		logger.Info("Deferring rollback of incomplete claim until its GPUs can be read")
		return rec.node.Specs.RemoveClaim(r.ClaimUID)
	}
	if err := rec.transaction.Revert(ctx, r); err != nil {
		return err
	}
	rec.reportInterrupted(ctx, r)
	return nil
}

// reportInterrupted reports that the driver undid what an interrupted call for the claim had left
// on the node.
func (rec *Reconciler) reportInterrupted(ctx context.Context, r checkpoint.Record) {
	what := "Rolled back interrupted preparation"
	if r.State == checkpoint.Reverting {
		what = "Finished interrupted unpreparation"
	}
	rec.report(ctx, "interrupted-claim", what, r.Namespace+"/"+r.Name)
}
