package reconcile

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// UnprepareOrphan unprepares a claim without a call from the kubelet. It does nothing if a call for
// the claim is running. It calls confirm under the claim's lock. If confirm returns an error, the
// claim stays prepared. done reports whether UnprepareOrphan unprepared the claim.
func (rec *Reconciler) UnprepareOrphan(ctx context.Context, uid types.UID,
	confirm func(ctx context.Context, r checkpoint.Record) error) (done bool, err error) {
	waiting, cancel := context.WithTimeout(ctx, tryWait)
	defer cancel()
	err = rec.transaction.UnlessBusy(waiting, uid, func(locks *lock.Guard) error {
		r, found, err := rec.node.Records.Load(uid)
		if err != nil || !found {
			return err
		}
		if err := confirm(ctx, r); err != nil {
			return err
		}
		if err := rec.transaction.UnprepareLocked(ctx, locks, uid); err != nil {
			return cause.ForClaim(r.Namespace+"/"+r.Name, err)
		}
		rec.observer.Unprepared(uid)
		done = true
		return nil
	})
	return done, err
}
