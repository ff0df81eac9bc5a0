package driver

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
)

// heldGPU lists a claim that has the first GPU, if it is true.
type heldGPU bool

func (h *heldGPU) List() ([]checkpoint.Entry, error) {
	if !*h {
		return nil, nil
	}
	return []checkpoint.Entry{{ClaimUID: "uid", Devices: []string{firstGPU}}}, nil
}

func (h *heldGPU) InUse(gpu string) (bool, error) { return bool(*h) && gpu == firstGPU, nil }

// noReports drops all health reports.
type noReports struct{}

func (noReports) Report(context.Context, *health.View, []device.GPU, []health.Change) {}
func (noReports) Count(map[health.EventKey]uint64, string)                            {}
func (noReports) NotCleared(string)                                                   {}

func TestOfferedViewKeepsLostGPU(t *testing.T) {
	inv, held := &inventorytest.Inventory{}, heldGPU(true)
	inv.Set(readyWith("0000:1b:00.0", "0000:43:00.0"))
	h := loop.New(t.Context(), loop.Options{
		StateDir: t.TempDir(), BootID: "boot", Inventory: inv, Records: &held, InUse: held.InUse, Reporter: noReports{},
		Watch: func(ctx context.Context, report func(device.Signal)) error {
			card := device.Card{PCIAddress: "0000:1b:00.0", UUID: "GPU-0000:1b:00.0"}
			report(device.Signal{Event: &device.HealthEvent{Card: card, Kind: device.EventXID, XID: 79, At: time.Now()}})
			<-ctx.Done()
			return nil
		},
	})
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { h.Run(ctx) })
	wg.Go(func() { _ = h.Watcher(ctx)(ctx) })
	eventually(t, "the XID counts", func() bool { return len(h.View().Findings("0000:1b:00.0")) > 0 })
	stop()
	wg.Wait()
	node := nodeview.New(inv, h, predecessor.NewStore(t.TempDir(), t.TempDir(), DriverName, "boot", durable.OS{}), noClaims)
	offered := func() inventory.Snapshot {
		node.Update()
		return node.View().Offered
	}

	inv.Set(readyWith("0000:43:00.0"))
	if now := offered(); !now.Ready || len(now.Node.GPUs) != 2 || now.Node.GPUs[1].WholeName() != firstGPU {
		t.Errorf("%+v", now)
	}
	inv.Set(inventory.Snapshot{Known: true, Reason: "no GPU of this node can be offered"})
	if now := offered(); !now.Ready || len(now.Node.GPUs) != 1 {
		t.Errorf("the only card: %+v", now)
	}
	inv.Set(inventory.Snapshot{Known: true, Empty: true, Reason: "the driver lists no GPU"})
	if now := offered(); !now.Ready || now.Empty || len(now.Node.GPUs) != 1 {
		t.Errorf("the only card was removed, and a claim has it: %+v", now)
	}
	held = false
	if now := offered(); now.Ready || !now.Empty {
		t.Errorf("the only card was removed: %+v", now)
	}
	inv.Set(readyWith("0000:43:00.0"))
	if now := offered(); len(now.Node.GPUs) != 1 {
		t.Errorf("a card was removed: %+v", now)
	}
	onBus := readyWith("0000:43:00.0")
	onBus.Node.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0"}}
	inv.Set(onBus)
	if now := offered(); len(now.Node.GPUs) != 2 {
		t.Errorf("a card that is on the bus: %+v", now)
	}
	inv.Set(inventory.Snapshot{Known: true, Reason: "no GPU of this node can be offered"})
	node.Report(nodeview.Condition{Source: "runtime", Message: "CDI is off"})
	if now := offered(); now.Ready {
		t.Errorf("a node that is not ready: %+v", now)
	}
	inv.Set(inventory.Snapshot{Reason: "not scanned yet"})
	if now := offered(); now.Ready || len(now.Node.GPUs) != 0 {
		t.Errorf("a node that was never scanned: %+v", now)
	}
}

// noClaims fakes a node without claims.
func noClaims(string) (bool, error) { return false, nil }
