package driver

import (
	"context"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// rescanLimit is how long a release waits for the scan after it. Opening a GPU may take seconds.
const rescanLimit = 10 * time.Second

// rescanning is a [steps.Binder] after whose calls the inventory scans. By itself the inventory
// notices another driver only after seconds. Until then the next claim could not have the GPU
// whole, and the kubelet retries much later.
type rescanning struct {
	steps.Binder
	inventory *inventory.Inventory
}

// Bind implements [steps.Binder].
func (b rescanning) Bind(ctx context.Context, card device.Card, found vfio.Found) error {
	defer b.inventory.RequestScan()
	return b.Binder.Bind(ctx, card, found)
}

// Release implements [steps.Binder]. It waits for the scan, so that a claim that gets the GPU next
// finds it in the inventory.
func (b rescanning) Release(ctx context.Context, card device.Card, found vfio.Found) error {
	if err := b.Binder.Release(ctx, card, found); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, rescanLimit)
	defer cancel()
	b.inventory.Rescan(ctx)
	return nil
}
