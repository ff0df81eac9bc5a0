package health

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// BenchmarkApply measures a monitor of eight GPUs. In each round all GPUs answer a query, one GPU
// sends an XID of an application error, and a reader takes the view.
func BenchmarkApply(b *testing.B) {
	m, now := New(nil, start), start
	gpus := make([]device.GPU, 8)
	for i := range gpus {
		gpus[i] = gpu
		gpus[i].PCIAddress, gpus[i].UUID = device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i)), fmt.Sprintf("GPU-%d", i)
	}
	m.Apply(device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, Driver: "load-1", At: now}}, now)
	m.Expect(gpus, now)
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(20 * time.Second)
		for _, g := range gpus {
			m.Apply(device.Signal{Condition: &device.Condition{Card: g.Card(), Reach: device.ReachOK, At: now}}, now)
		}
		m.Apply(device.Signal{Event: &device.HealthEvent{Card: gpus[0].Card(), Kind: device.EventXID, XID: 31, At: now}}, now)
		m.Tick(now)
		view := m.View()
		for _, g := range gpus {
			if v := view.Of(g, device.Name{GPU: g.WholeName()}); v.State == Lost {
				b.Fatal(v)
			}
		}
		m.Changes()
	}
}
