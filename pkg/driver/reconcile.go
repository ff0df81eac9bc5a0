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

// How often records and hardware are compared: regularly, and again soon where something is left to do.
const (
	reconcileInterval = 30 * time.Second
	reconcileRetry    = 5 * time.Second
)

// reconcile compares records and hardware until the context ends, whenever it is asked to and otherwise regularly.
func (d *Driver) reconcile(ctx context.Context) {
	d.sayWhatWasGiven(ctx)
	var left disagreement
	asked := true
	for {
		pause := reconcileInterval
		if compared, err := d.reconcileOnce(ctx); compared {
			pause = left.next(klog.FromContext(ctx), err, asked)
		}
		select {
		case <-ctx.Done():
			return
		case <-d.toReconcile:
			asked = true
		case <-time.After(pause):
			asked = false
		}
	}
}

// disagreement is what records and hardware did not agree in when they were last compared.
type disagreement struct {
	// said are the errors, sorted: they come in any order.
	said  []string
	pause time.Duration
}

// next says of an error what is new in it, and how soon to compare again: quickly where something has changed (a comparison was asked for, more or less is
// left), and else less and less quickly, down to the regular pace. What does not get better by itself mostly waits for somebody to act.
func (l *disagreement) next(logger klog.Logger, err error, asked bool) time.Duration {
	var now []string
	if err != nil {
		now = slices.Sorted(strings.SplitSeq(err.Error(), "\n"))
	}
	before := l.said
	l.said = now
	switch {
	case err == nil:
		l.pause = reconcileInterval
	case asked, len(now) != len(before):
		l.pause = reconcileRetry
	default:
		l.pause = min(2*l.pause, reconcileInterval)
	}
	unsaid := slices.ContainsFunc(now, func(line string) bool { return !slices.Contains(before, line) })
	switch {
	case unsaid:
		logger.Error(err, "Records and hardware do not agree yet; trying again, and saying so again when that changes")
	case err != nil:
		logger.V(2).Info("Records and hardware do not agree yet; trying again", "err", err, "after", l.pause)
	case len(before) > 0:
		logger.Info("Records and hardware agree again")
	}
	return l.pause
}

// sayWhatWasGiven makes up for what an instance that was killed could not write into claims any more.
func (d *Driver) sayWhatWasGiven(ctx context.Context) {
	claims, err := d.preparer.Prepared()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not look whether the claims say what they were given")
	}
	for _, c := range claims {
		d.status.Changed(ctx, c, d.given(c.UID))
	}
}

// reconcileOnce compares, if it is this instance's to do and the hardware may be had now. Its error is what is not as it should be.
func (d *Driver) reconcileOnce(ctx context.Context) (compared bool, _ error) {
	if d.superseded.Load() {
		return false, nil
	}
	done, ok := d.release.Use()
	defer done()
	if !ok {
		return false, nil // it is woken again
	}
	if d.unrecovered.Load() {
		if err := d.recover(ctx); err != nil {
			return true, err
		}
	}
	d.lost.Begin()
	err := d.preparer.Reconcile(ctx)
	d.reportLost(ctx, err)
	err = errors.Join(err, d.adopt(ctx), d.modes.Off(ctx, d.layouts.Uncut()))
	d.countDaemons(ctx)
	return true, err
}

// adopt takes over what admins hand over. A GPU that hangs keeps no other waiting.
func (d *Driver) adopt(ctx context.Context) error {
	gpus := d.layouts.HandedOver()
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		wg.Go(func() {
			if err := d.preparer.Adopt(ctx, g.Card(), g.WholeName()); err != nil {
				errs[i] = fmt.Errorf("take over what an admin hands over on %s: %w", g.WholeName(), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
