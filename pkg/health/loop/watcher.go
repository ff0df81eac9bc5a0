package loop

import (
	"context"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Watcher returns a function that watches the hardware until its own context ends. The function may
// be called again, but not while it runs. An error means that the plugin may still have the GPUs
// open. ctx ends when the plugin stops.
func (l *Loop) Watcher(ctx context.Context) func(running context.Context) error {
	if l.opts.Watch == nil {
		return func(running context.Context) error {
			<-running.Done()
			return nil
		}
	}
	modes := &modeWatch{inv: l.opts.Inventory, reported: map[device.PCIAddress]device.MIGMode{}}
	return func(running context.Context) error {
		return l.opts.Watch(running, func(s device.Signal) {
			modes.observe(s.Condition)
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
