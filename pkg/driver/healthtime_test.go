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

// runHealthLoop runs the test with a health loop in simulated time. The function flushes returns
// how often the loop has reported changes since the start.
func runHealthLoop(t *testing.T, test func(ctx context.Context, h *healthWatch, flushes func() int)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		inv := &fakeInventory{}
		inv.set(readyWith("0000:1b:00.0", "0000:43:00.0"))
		h := newHealthWatch(nil, nil, dir, "boot", inv)
		var flushes atomic.Int64
		h.onChange = func(context.Context, []health.Change) { flushes.Add(1) }
		h.onCounts = func(map[health.EventKey]uint64, string) {}
		h.inUse = func(string) bool { return false }
		ctx, cancel := context.WithCancel(t.Context())
		j := h.newLoop(ctx)
		done := make(chan struct{})
		go func() { defer close(done); j.Run(ctx) }()
		h.SetLeader(true)
		test(ctx, h, func() int { return int(flushes.Load()) })
		cancel()
		<-done
	})
}

func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // simulated time
	synctest.Wait()
}

func xidAt(address device.PCIAddress, code uint64) device.Signal {
	return device.Signal{Event: &device.HealthEvent{
		Card: device.Card{PCIAddress: address, UUID: "GPU-" + string(address)}, Kind: device.EventXID, XID: code, At: time.Now()}}
}

func watcherUp() device.Signal {
	return device.Signal{Watcher: &device.WatcherState{Up: true, Events: true, Driver: "load", At: time.Now()}}
}

func TestFirstEventIsFlushedAtOnceAndBurstsMerge(t *testing.T) {
	runHealthLoop(t, func(ctx context.Context, h *healthWatch, flushes func() int) {
		advance(time.Minute)
		h.Enqueue(ctx, watcherUp())
		advance(time.Second)
		before := flushes()
		h.Enqueue(ctx, xidAt("0000:1b:00.0", 79))
		synctest.Wait()
		if n := flushes() - before; n != 1 {
			t.Errorf("%d flushes at once, want 1", n)
		}
		for i := range 1000 {
			h.Enqueue(ctx, xidAt("0000:43:00.0", uint64(1000+i)))
			advance(time.Millisecond)
		}
		advance(time.Second)
		if n := flushes() - before; n > 13 {
			t.Errorf("1000 kinds of events in a second led to %d flushes", n)
		}
		if v := h.View().Of(readyWith("0000:1b:00.0").Node.GPUs[0].GPU, device.Name{GPU: firstGPU}); v.State != health.Unhealthy {
			t.Errorf("%+v", v)
		}
	})
}

func TestSilenceBecomesUnknown(t *testing.T) {
	runHealthLoop(t, func(ctx context.Context, h *healthWatch, _ func() int) {
		state := func() health.State {
			return h.View().Of(readyWith("0000:1b:00.0").Node.GPUs[0].GPU, device.Name{GPU: firstGPU}).State
		}
		h.Enqueue(ctx, watcherUp())
		advance(20 * time.Second)
		if s := state(); s != health.Healthy {
			t.Error(s)
		}
		advance(15 * time.Second)
		if s := state(); s != health.Unknown {
			t.Error(s)
		}
		if h.Stale(time.Now()) {
			t.Error("the loop does not tick")
		}
	})
}

// bubbleGoroutines returns the number of goroutines in the test's synctest bubble, without those of
// Go's runtime and of other tests.
func bubbleGoroutines(t *testing.T) int {
	t.Helper()
	stacks := make([]byte, 1<<20)
	n := bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte(", synctest bubble "))
	if n == 0 {
		t.Fatal("the test's own goroutine is missing")
	}
	return n
}

// After a storm of events, neither the heap nor the number of goroutines may have grown.
func TestEventStormLeaksNothing(t *testing.T) {
	runHealthLoop(t, func(ctx context.Context, h *healthWatch, _ func() int) {
		h.Enqueue(ctx, watcherUp())
		storm := func() (heap uint64, goroutines int) {
			for i := range 10_000 {
				h.Enqueue(ctx, xidAt("0000:1b:00.0", uint64(i%300)))
				if i%100 == 0 {
					advance(10 * time.Millisecond)
				}
			}
			advance(time.Second)
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc, bubbleGoroutines(t)
		}
		heap, goroutines := storm()
		laterHeap, laterGoroutines := storm()
		if laterGoroutines > goroutines || laterHeap > heap+1<<20 {
			t.Errorf("from %d bytes and %d goroutines to %d and %d", heap, goroutines, laterHeap, laterGoroutines)
		}
	})
}
