package loop

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Watcher returns a function that watches the hardware until its own context ends. The function may
// be called again, but not while it runs. An error means that the plugin may still have the GPUs
// open. ctx ends when the plugin stops.
func (l *Loop) Watcher(ctx context.Context) func(running context.Context) error {
	return func(running context.Context) error {
		return l.opts.Watch(running, func(s device.Signal) {
			l.scanIfModeChanged(s.Condition)
			l.logRemapGap(ctx, s.Condition)
			// When the plugin stops, its watcher closes the hardware. A signal about that says nothing about
			// the GPUs' health.
			if ctx.Err() != nil {
				return
			}
			select { // blocks while the queue is full
			case l.signals <- s:
			case <-ctx.Done():
			}
		})
	}
}

// scanIfModeChanged requests a scan of the hardware if an admin has changed a GPU's MIG mode. The
// change shows in no file that the inventory watches, but the hardware watcher reports the mode.
func (l *Loop) scanIfModeChanged(c *device.Condition) {
	if c == nil || c.MIG == nil {
		return
	}
	for _, g := range l.opts.Inventory.Snapshot().Node.GPUs {
		if g.PCIAddress == c.Card.PCIAddress && g.MIG != nil && *c.MIG != (device.MIGMode{Enabled: g.MIG.Enabled, Pending: g.MIG.Pending}) {
			l.opts.Inventory.RequestScan()
		}
	}
}

// logRemapGap logs once when a GPU with MIG instances reports no row remaps, which only such a GPU
// can refuse, and when it reports them again.
func (l *Loop) logRemapGap(ctx context.Context, c *device.Condition) {
	if c == nil || c.Reach != device.ReachOK {
		return
	}
	gap := c.Remap == nil && c.MIG != nil && c.MIG.Enabled
	l.mu.Lock()
	defer l.mu.Unlock()
	if gap == l.remapGaps[c.Card.PCIAddress] {
		return
	}
	l.remapGaps[c.Card.PCIAddress] = gap
	if logger := klog.FromContext(ctx); gap {
		logger.Info("GPU reports no row remaps while it is in MIG mode, so one that is pending or failed stays unnoticed", "gpu", c.Card.String())
	} else {
		logger.Info("GPU reports row remaps again", "gpu", c.Card.String())
	}
}
