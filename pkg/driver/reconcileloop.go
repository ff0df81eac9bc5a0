package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// reconcileInterval is the usual pause between two comparisons of checkpoint records with the
// hardware. reconcileRetry is the pause after a new error.
const (
	reconcileInterval = 30 * time.Second
	reconcileRetry    = 5 * time.Second
)

// reconcile compares the claims' checkpoint records with the hardware every reconcileInterval, and
// when d.toReconcile is signaled. It runs until the context ends.
func (d *Driver) reconcile(ctx context.Context) {
	var left discrepancies
	requested := true
	for {
		pause := reconcileInterval
		if ran, err := d.reconcileOnce(ctx); ran {
			pause = left.next(klog.FromContext(ctx), err, requested)
		}
		select {
		case <-ctx.Done():
			return
		case <-d.toReconcile:
			requested = true
		case <-time.After(pause):
			requested = false
		}
	}
}

// discrepancies has the differences between checkpoint records and hardware that were logged last,
// so that each is logged once.
type discrepancies struct {
	// reported has the lines of the last error. They are sorted, because each comparison may return
	// them in another order.
	reported []string
	pause    time.Duration
}

// next logs the error err of a comparison if it has new lines, and returns the pause until the next
// one: reconcileInterval without an error, reconcileRetry if this comparison was requested or the
// number of lines changed, else twice the last pause, because most lasting errors need an operator.
func (d *discrepancies) next(logger klog.Logger, err error, requested bool) time.Duration {
	var now []string
	if err != nil {
		now = slices.Sorted(strings.SplitSeq(err.Error(), "\n"))
	}
	before := d.reported
	d.reported = now
	switch {
	case err == nil:
		d.pause = reconcileInterval
	case requested, len(now) != len(before):
		d.pause = reconcileRetry
	default:
		d.pause = min(2*d.pause, reconcileInterval)
	}
	news := slices.ContainsFunc(now, func(line string) bool { return !slices.Contains(before, line) })
	switch {
	case news:
		logger.Error(err, "Checkpoint records and hardware differ; retrying")
	case err != nil:
		logger.V(2).Info("Checkpoint records and hardware still differ; retrying", "err", err, "after", d.pause)
	case len(before) > 0:
		logger.Info("Checkpoint records and hardware agree again")
	}
	return d.pause
}

// reconcileOnce compares the claims' checkpoint records with the hardware and repairs differences.
// The error lists those that are left. compared is false if it did nothing, because a newer plugin
// instance leads or the GPUs are released.
func (d *Driver) reconcileOnce(ctx context.Context) (compared bool, _ error) {
	if d.newerLeads.Load() {
		return false, nil
	}
	done, ok := d.quiesce.Use()
	defer done()
	if !ok {
		return false, nil // the end of the release wakes reconciliation
	}
	if d.unrecovered.Load() {
		if err := d.recoverClaims(ctx); err != nil {
			return true, err
		}
	}
	d.status.BeginComparison()
	err := d.preparer.Reconcile(ctx)
	d.status.EndComparison(ctx, err)
	err = errors.Join(err, d.adopt(ctx), d.migModes.Clean(ctx, d.layouts.MIGModeUnneeded()))
	d.reportDaemons(ctx)
	return true, err
}

// adopt takes over MIG instances that admins have handed over to the driver. It uses one goroutine
// per GPU, so that a hung GPU does not delay the others.
func (d *Driver) adopt(ctx context.Context) error {
	gpus := d.layouts.HandedOver()
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		wg.Go(func() {
			if err := d.preparer.Adopt(ctx, g.Card(), g.WholeName()); err != nil {
				errs[i] = fmt.Errorf("adopt MIG instances that an admin handed over on %s: %w", g.WholeName(), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
