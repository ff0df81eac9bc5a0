package prepare

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// reconcileTime bounds the work on one claim's hardware.
const reconcileTime = 30 * time.Second

// Reconcile brings hardware and records to agree, for every claim that no other call works on. What was not finished, or not given back in whole, is
// reverted. A partition of a prepared claim that is gone is cut again at its place; where that is impossible, the claim's spec is removed, so that its next
// container fails to start and never gets another device, and the error says which device is lost; see [Lost].
//
// How devices are shared is looked at, which the inventory does not see, and set again.
//
// Claims side by side: a GPU that hangs keeps no other waiting. What the inventory sees as it should be is not asked for again.
func (p *Preparer) Reconcile(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	for _, e := range entries {
		wg.Go(func() {
			if err := p.reconcileClaim(ctx, e.ClaimUID); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Go(func() {
		if err := p.orphans(ctx); err != nil {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}
	})
	wg.Wait()
	return errors.Join(errs...)
}

func (p *Preparer) reconcileClaim(ctx context.Context, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	held, err := p.lock(waiting, uid)
	if err != nil {
		return nil // the call that works on it brings it to agree
	}
	defer held.Release()
	r, found, err := p.Records.Load(uid)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return nil // Recover has said so; it stays until its claim is given back
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		return nil
	}
	most := reconcileTime
	if r.State == checkpoint.Prepared {
		err := p.rewrite(ctx, r, p.seen)
		unseen := errors.Is(err, errUnseen)
		if !unseen && !sharesSteps(r) {
			return err
		}
		if !unseen {
			most = roundTime
		}
	}
	work, cancelWork := context.WithTimeout(ctx, most)
	defer cancelWork()
	if err := lockGPUs(work, held, r.GPUs()...); err != nil {
		return fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	if r.State == checkpoint.Prepared {
		return p.rewrite(work, r, p.held)
	}
	klog.FromContext(ctx).Info("Reverting what was not finished or not given back in whole", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid, "state", r.State)
	round, cancelRound := context.WithTimeout(work, roundTime+answerTime)
	defer cancelRound()
	return p.revert(round, r)
}
