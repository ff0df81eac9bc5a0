package driver

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// How often records and hardware are compared: regularly, and again soon where something is left to do.
const (
	reconcileInterval = 30 * time.Second
	reconcileRetry    = 5 * time.Second
)

// reconcile compares records and hardware until the context ends, whenever it is asked to and otherwise regularly.
func (d *Driver) reconcile(ctx context.Context) {
	d.sayWhatWasGiven(ctx)
	for {
		pause := reconcileInterval
		if !d.reconcileOnce(ctx) {
			pause = reconcileRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-d.toReconcile:
		case <-time.After(pause):
		}
	}
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

// reconcileOnce says whether all is as it should be now.
func (d *Driver) reconcileOnce(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	if d.superseded.Load() {
		return true
	}
	done, ok := d.release.Use()
	defer done()
	if !ok {
		return true // it is woken again
	}
	if d.unrecovered.Load() {
		if err := d.recover(ctx); err != nil {
			logger.Error(err, "Trying again")
			return false
		}
	}
	settled := true
	err := d.preparer.Reconcile(ctx)
	if err != nil {
		settled = false
		logger.Error(err, "Records and hardware do not agree yet; trying again")
	}
	d.reportLost(ctx, err)
	if !d.adopt(ctx) {
		settled = false
	}
	d.countDaemons(ctx)
	return settled
}

// adopt takes over what admins hand over, and says whether that is done. A GPU that hangs keeps no other waiting.
func (d *Driver) adopt(ctx context.Context) bool {
	gpus := d.layouts.HandedOver()
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, g := range gpus {
		wg.Go(func() { errs[i] = d.preparer.Adopt(ctx, g.Card(), g.WholeName()) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			klog.FromContext(ctx).Error(err, "Could not take over all instances that an admin hands over", "gpu", gpus[i].WholeName())
		}
	}
	return errors.Join(errs...) == nil
}

// toldLost is what was said of a device that a claim has lost.
type toldLost struct {
	claim           kubeletplugin.NamespacedObject
	device, message string
}

// reportLost says of each claim that has lost a device so where its user looks, once for each way in which it was lost, and when it has the device again.
// err is that of a comparison of all claims.
func (d *Driver) reportLost(ctx context.Context, err error) {
	now := map[string]toldLost{}
	for _, lost := range prepare.Lost(err) {
		namespace, name, _ := strings.Cut(lost.Claim, "/")
		told := toldLost{kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, UID: lost.UID}, lost.Device, lost.Error()}
		key := string(lost.UID) + "/" + lost.Device
		now[key] = told
		if d.lost[key] == told {
			continue
		}
		d.status.Lost(ctx, told.claim, lost.Device, "Lost", told.message)
		d.events.warnClaim(told.claim, "DeviceLost", told.message)
	}
	for key, told := range d.lost {
		switch _, still := now[key]; {
		case still:
		case err != nil:
			now[key] = told // another error may stand in for that of this claim
		default:
			d.status.Changed(ctx, told.claim, d.given(told.claim.UID))
		}
	}
	d.lost = now
	unhealthy := make(map[string]string, len(now))
	for _, told := range now {
		unhealthy[told.device] = told.message
	}
	d.unhealthy.Store(&unhealthy)
}
