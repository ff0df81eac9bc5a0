package loop

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// A GPU that a claim has for a virtual machine is not lost, however long NVML does not list it, and
// is known as it was, also after a restart of the plugin.
func TestLentGPUIsNeitherLostNorForgotten(t *testing.T) {
	dir, before := t.TempDir(), device.GPU{}
	name := device.Name{GPU: firstGPU, Passthrough: true}
	check := func(l *loopTest) {
		t.Helper()
		if lent := l.Lent(l.inventory.Snapshot()); len(lent) != 1 || lent[0].UUID != before.UUID || before.UUID == "" {
			t.Errorf("lent GPUs: %+v", lent)
		}
		if v := l.View().Of(before, name); v.State != health.Healthy {
			t.Errorf("the lent GPU is %s: %+v", v.State, v.Causes)
		}
		if missing := l.Missing(l.inventory.Snapshot()); len(missing) != 0 {
			t.Errorf("missing: %+v", missing)
		}
	}
	runLoop(t, dir, func(l *loopTest) {
		before = l.inventory.Snapshot().Node.GPUs[0].GPU
		if lent := l.Lent(l.inventory.Snapshot()); len(lent) != 0 {
			t.Errorf("a GPU that NVML lists is lent: %+v", lent)
		}
		l.inventory.Set(readyWith("0000:43:00.0"))
		l.send(device.Signal{Condition: &device.Condition{Card: before.Card(), At: time.Now(), Reach: device.ReachLost}})
		<-time.After(10 * time.Minute)
		check(l)
	}, name.String())
	runLoop(t, dir, func(l *loopTest) {
		l.inventory.Set(readyWith("0000:43:00.0"))
		<-time.After(time.Minute)
		check(l)
	}, name.String())
}

// The file name of a record with many devices does not list them. While the record is unreadable,
// the GPU stays as it was known before.
func TestGPUOfAClaimWithManyIsLent(t *testing.T) {
	names := []string{device.Name{GPU: firstGPU, Passthrough: true}.String()}
	for i := range 15 {
		names = append(names, fmt.Sprintf("gpu-0001-%02x-00-0-vfio", i))
	}
	runLoop(t, t.TempDir(), func(l *loopTest) {
		before := l.inventory.Snapshot().Node.GPUs[0].GPU
		l.inventory.Set(readyWith("0000:43:00.0"))
		for range 2 {
			l.send(device.Signal{Condition: &device.Condition{Card: before.Card(), At: time.Now(), Reach: device.ReachLost}})
			advance(10 * time.Minute)
			if lent := l.Lent(l.inventory.Snapshot()); len(lent) != 1 || lent[0].UUID != before.UUID || l.state("0000:1b:00.0") != health.Healthy {
				t.Errorf("lent GPUs: %+v, the first is %s", lent, l.state("0000:1b:00.0"))
			}
			l.held.spoil()
		}
	}, names...)
}

func TestGPUThatComesBackDifferentIsUnhealthy(t *testing.T) {
	name := device.Name{GPU: firstGPU, Passthrough: true}
	runLoop(t, t.TempDir(), func(l *loopTest) {
		s := readyWith("0000:1b:00.0", "0000:43:00.0")
		g := s.Node.GPUs[0].GPU
		away := readyWith("0000:43:00.0")
		away.Node.Passthrough = []device.GPU{{PCIAddress: "0000:1b:00.0", Passthrough: &device.Passthrough{BoundByAdmin: true}}}
		l.inventory.Set(away)
		<-time.After(2 * time.Second)
		s.Node.GPUs[0].MIG = &device.MIG{Enabled: true}
		l.inventory.Set(s)
		<-time.After(2 * time.Second)
		if v := l.View().Of(g, device.Name{GPU: firstGPU}); v.State != health.Unhealthy || v.Causes[0].Code != "changed-mig" {
			t.Errorf("%s: %s", v.State, v.Message())
		}
	}, name.String())
}

func TestLentGPUThatNobodyKnowsIsAsSysfsSays(t *testing.T) {
	name := device.Name{GPU: "gpu-0000-99-00-0", Passthrough: true}
	runLoop(t, t.TempDir(), func(l *loopTest) {
		s := inventory.Snapshot{}
		if lent := l.Lent(s); len(lent) != 0 {
			t.Errorf("%+v", lent)
		}
		s.Node.Passthrough = []device.GPU{{PCIAddress: "0000:99:00.0", Passthrough: &device.Passthrough{DeviceID: 0x2330, BoundByAdmin: true}}}
		lent := l.Lent(s)
		if len(lent) != 1 || lent[0].Passthrough.DeviceID != 0x2330 || lent[0].Passthrough.BoundByAdmin {
			t.Errorf("%+v", lent)
		}
		if !s.Node.Passthrough[0].Passthrough.BoundByAdmin {
			t.Error("the scan's result was changed")
		}
	}, name.String())
}

// After the claim's end the driver may switch MIG mode on for the next claim.
func TestReturnedGPUMayChangeAtOnce(t *testing.T) {
	name := device.Name{GPU: firstGPU, Passthrough: true}
	runLoop(t, t.TempDir(), func(l *loopTest) {
		away, back := readyWith("0000:43:00.0"), readyWith("0000:1b:00.0", "0000:43:00.0")
		away.Node.Passthrough = []device.GPU{{PCIAddress: "0000:1b:00.0", Passthrough: &device.Passthrough{BoundByAdmin: true}}}
		l.inventory.Set(away)
		advance(2 * time.Second)
		l.inventory.Set(back)
		l.held.ended.Store(true)
		advance(2 * time.Second)
		changed := readyWith("0000:1b:00.0", "0000:43:00.0")
		changed.Node.GPUs[0].MIG = &device.MIG{Enabled: true}
		l.inventory.Set(changed)
		advance(2 * time.Second)
		if state := l.state("0000:1b:00.0"); state != health.Healthy {
			t.Errorf("the GPU is %s", state)
		}
	}, name.String())
}
