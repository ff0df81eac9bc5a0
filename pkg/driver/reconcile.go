package driver

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// How often records and hardware are compared: regularly, and again soon where something is left to do.
const (
	reconcileInterval = 30 * time.Second
	reconcileRetry    = 5 * time.Second
)

// reconcile compares records and hardware until the context ends, whenever the inventory has seen a change and otherwise regularly.
func (d *Driver) reconcile(ctx context.Context, seen <-chan struct{}) {
	for {
		pause := reconcileInterval
		if !d.reconcileOnce(ctx) {
			pause = reconcileRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-seen:
		case <-time.After(pause):
		}
	}
}

// reconcileOnce says whether all is as it should be now.
func (d *Driver) reconcileOnce(ctx context.Context) bool {
	logger := klog.FromContext(ctx)
	if d.superseded.Load() {
		return true
	}
	settled := true
	if err := d.preparer.Reconcile(ctx); err != nil {
		settled = false
		logger.Error(err, "Records and hardware do not agree yet; trying again")
	}
	for _, g := range d.layouts.HandedOver() {
		if err := d.preparer.Adopt(ctx, nvidia.Card{PCIAddress: g.PCIAddress, UUID: g.UUID}, g.WholeName()); err != nil {
			settled = false
			logger.Error(err, "Could not take over all instances that an admin hands over", "gpu", g.WholeName())
		}
	}
	d.countHeld(ctx)
	return settled
}
