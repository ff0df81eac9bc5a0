package driver

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// lending is a binder of one GPU.
type lending struct {
	steps.Binder
	away atomic.Bool
}

func (l *lending) Bind(context.Context, device.Card, vfio.Found) error {
	l.away.Store(true)
	return nil
}

func (l *lending) Release(context.Context, device.Card, vfio.Found) error {
	l.away.Store(false)
	return nil
}

func TestReleasedGPUIsInTheInventoryWhenTheReleaseReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gpu, hang := &lending{}, atomic.Bool{}
		inv := inventory.New(inventory.Hardware{
			Scan: func(ctx context.Context) (nvidia.Node, error) {
				node := nvidia.Node{GPUs: []nvidia.GPU{{GPU: device.GPU{PCIAddress: "0000:1b:00.0"}}}}
				if !gpu.away.Load() {
					node.GPUs = append(node.GPUs, nvidia.GPU{GPU: device.GPU{PCIAddress: "0000:43:00.0"}})
				}
				<-time.After(time.Second) // what a scan found may be outdated when it ends
				if hang.Load() {
					<-ctx.Done()
				}
				return node, ctx.Err()
			},
			Fingerprint: func() string { return "" },
			Present:     func() (bool, error) { return true, nil },
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			inv.Run(ctx, func() {})
		}()
		defer func() {
			cancel()
			<-ended
		}()
		b := rescanning{gpu, inv}
		for range 2 {
			if err := b.Bind(ctx, device.Card{}, vfio.Found{}); err != nil {
				t.Fatal(err)
			}
			<-time.After(1500 * time.Millisecond) // a scan runs that began before the release
			if err := b.Release(ctx, device.Card{}, vfio.Found{}); err != nil || len(inv.Snapshot().Node.GPUs) != 2 {
				t.Errorf("%d GPUs, %v", len(inv.Snapshot().Node.GPUs), err)
			}
		}
		hang.Store(true)
		began := time.Now()
		if err := b.Release(ctx, device.Card{}, vfio.Found{}); err != nil || time.Since(began) != rescanLimit {
			t.Errorf("with a hung scan: %v after %s", err, time.Since(began))
		}
	})
}
