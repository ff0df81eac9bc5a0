package driver

import (
	"bytes"
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
)

// judging runs what judges in a bubble of fake time.
func judging(t *testing.T, test func(ctx context.Context, h *healthWatch, told func() int)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		inv := &fakeInventory{}
		inv.set(readyWith("0000:1b:00.0", "0000:43:00.0"))
		h := newHealthWatch(nil, nil, dir, "boot", inv)
		var told atomic.Int64
		h.tell = func(context.Context, []health.Change) { told.Add(1) }
		h.count = func(map[health.Counted]uint64, string) {}
		h.inUse = func(string) bool { return false }
		ctx, cancel := context.WithCancel(t.Context())
		j := h.begin(ctx)
		done := make(chan struct{})
		go func() { defer close(done); j.Run(ctx) }()
		h.Publishes(true)
		test(ctx, h, func() int { return int(told.Load()) })
		cancel()
		<-done
	})
}

func passes(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the bubble's fake time
	synctest.Wait()
}

func xidAt(address device.PCIAddress, code uint64) device.Signal {
	return device.Signal{Event: &device.HealthEvent{Card: device.Card{PCIAddress: address, UUID: "GPU-" + string(address)}, Kind: device.EventXID, XID: code, At: time.Now()}}
}

func listening() device.Signal {
	return device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, Driver: "load", At: time.Now()}}
}

func TestTheFirstEventIsToldAtOnceAndABurstAsAFew(t *testing.T) {
	judging(t, func(ctx context.Context, h *healthWatch, told func() int) {
		passes(time.Minute)
		h.Told(ctx, listening())
		passes(time.Second)
		before := told()
		h.Told(ctx, xidAt("0000:1b:00.0", 79))
		synctest.Wait()
		if n := told() - before; n != 1 {
			t.Errorf("told %d times without any time having passed", n)
		}
		for i := range 1000 {
			h.Told(ctx, xidAt("0000:43:00.0", uint64(1000+i)))
			passes(time.Millisecond)
		}
		passes(time.Second)
		if n := told() - before; n > 13 {
			t.Errorf("1000 kinds of events in a second are told %d times", n)
		}
		if v := h.View().Of(readyWith("0000:1b:00.0").Node.GPUs[0].GPU, device.Name{GPU: firstGPU}); v.State != health.Unhealthy {
			t.Errorf("%+v", v)
		}
	})
}

func TestSilenceBecomesUnknown(t *testing.T) {
	judging(t, func(ctx context.Context, h *healthWatch, _ func() int) {
		state := func() health.State {
			return h.View().Of(readyWith("0000:1b:00.0").Node.GPUs[0].GPU, device.Name{GPU: firstGPU}).State
		}
		h.Told(ctx, listening())
		passes(20 * time.Second)
		if s := state(); s != health.Healthy {
			t.Error(s)
		}
		passes(15 * time.Second)
		if s := state(); s != health.Unknown {
			t.Error(s)
		}
		if h.Stale(time.Now()) {
			t.Error("time is not thought about")
		}
	})
}

// inBubble counts the goroutines of the test alone: Go's runtime has some of its own that come and go, and other tests may not have ended theirs.
func inBubble(t *testing.T) int {
	t.Helper()
	stacks := make([]byte, 1<<20)
	n := bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte(", synctest bubble "))
	if n == 0 {
		t.Fatal("not even this goroutine is found")
	}
	return n
}

// TestTenThousandEventsLeaveNothingBehind looks at what a storm costs.
func TestTenThousandEventsLeaveNothingBehind(t *testing.T) {
	judging(t, func(ctx context.Context, h *healthWatch, _ func() int) {
		h.Told(ctx, listening())
		storm := func() (heap uint64, goroutines int) {
			for i := range 10_000 {
				h.Told(ctx, xidAt("0000:1b:00.0", uint64(i%300)))
				if i%100 == 0 {
					passes(10 * time.Millisecond)
				}
			}
			passes(time.Second)
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc, inBubble(t)
		}
		heap, goroutines := storm()
		laterHeap, laterGoroutines := storm()
		if laterGoroutines > goroutines || laterHeap > heap+1<<20 {
			t.Errorf("from %d bytes and %d goroutines to %d and %d", heap, goroutines, laterHeap, laterGoroutines)
		}
	})
}
