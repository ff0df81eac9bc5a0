package loop

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/inventorytest"
)

const firstGPU = "gpu-0000-1b-00-0"

var readyWith = inventorytest.Ready

// heldDevices lists one claim, which has these devices until it has ended.
type heldDevices struct {
	*checkpoint.Store
	disk  *durabletest.Disk
	names []string
	ended atomic.Bool
}

func (h *heldDevices) List() ([]checkpoint.Entry, error) {
	if len(h.names) == 0 || h.ended.Load() {
		return nil, nil
	}
	return h.Store.List()
}

func hold(names []string) *heldDevices {
	disk := durabletest.New()
	records, err := checkpoint.Open("/state", disk)
	r := checkpoint.Record{ClaimUID: "uid"}
	for _, name := range names {
		r.Devices = append(r.Devices, checkpoint.Device{Device: name})
	}
	if err := errors.Join(err, records.Save(r)); err != nil {
		panic(err)
	}
	return &heldDevices{Store: records, disk: disk, names: names}
}

// spoil makes the claim's record unreadable.
func (h *heldDevices) spoil() {
	for _, name := range h.disk.Names("/state/claims") {
		h.disk.Put("/state/claims/"+name, []byte("{"))
	}
}

// unreadable is a device of a claim whose record cannot be read.
const unreadable = "unreadable"

func (h *heldDevices) InUse(gpu string) (bool, error) {
	if h.ended.Load() {
		return false, nil
	}
	if slices.Contains(h.names, unreadable) {
		return false, errors.New("unreadable record")
	}
	return slices.ContainsFunc(h.names, func(name string) bool { return strings.HasPrefix(name, gpu) }), nil
}

// reports counts the reports and keeps the last one.
type reports struct {
	mu      sync.Mutex
	count   int
	gpus    []device.GPU
	changes []health.Change
}

func (r *reports) Report(_ context.Context, _ *health.View, gpus []device.GPU, changes []health.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	r.gpus, r.changes = gpus, changes
}

func (r *reports) Count(map[health.EventKey]uint64, string) {}
func (r *reports) NotCleared(string)                        {}

func (r *reports) flushes() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count
}

// loopTest has a loop with fakes around it. The fake hardware watcher reports what send gets.
type loopTest struct {
	*Loop
	*reports
	inventory *inventorytest.Inventory
	held      *heldDevices
	send      func(device.Signal)
}

// newLoop returns a loop that saves its findings in dir. Its node has two GPUs.
func newLoop(ctx context.Context, dir string, held ...string) *loopTest {
	l := &loopTest{reports: &reports{}, inventory: &inventorytest.Inventory{}, held: hold(held)}
	l.inventory.Set(readyWith("0000:1b:00.0", "0000:43:00.0"))
	l.Loop = New(ctx, Options{
		StateDir: dir, BootID: "boot", Inventory: l.inventory, Records: l.held, InUse: l.held.InUse, Reporter: l.reports,
		Watch: func(ctx context.Context, report func(device.Signal)) error {
			l.send = report
			<-ctx.Done()
			return nil
		},
	})
	return l
}

// runLoop runs the test with a running loop in simulated time. The plugin is the leader.
func runLoop(t *testing.T, dir string, test func(l *loopTest), held ...string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		l := newLoop(ctx, dir, held...)
		var wg sync.WaitGroup
		wg.Go(func() { l.Run(ctx) })
		wg.Go(func() { _ = l.Watcher(ctx)(ctx) })
		l.SetLeader(true)
		synctest.Wait()
		test(l)
		cancel()
		wg.Wait()
	})
}

// state returns the health of the GPU at this address.
func (l *loopTest) state(address device.PCIAddress) health.State {
	gpu := readyWith(address).Node.GPUs[0].GPU
	return l.View().Of(gpu, device.Name{GPU: gpu.WholeName()}).State
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
	runLoop(t, t.TempDir(), func(l *loopTest) {
		advance(time.Minute)
		l.send(watcherUp())
		advance(time.Second)
		before := l.flushes()
		l.send(xidAt("0000:1b:00.0", 79))
		synctest.Wait()
		if n := l.flushes() - before; n != 1 {
			t.Errorf("%d flushes at once, want 1", n)
		}
		for i := range 1000 {
			l.send(xidAt("0000:43:00.0", uint64(1000+i)))
			advance(time.Millisecond)
		}
		advance(time.Second)
		if n := l.flushes() - before; n > 13 {
			t.Errorf("1000 kinds of events in a second led to %d flushes", n)
		}
		if s := l.state("0000:1b:00.0"); s != health.Unhealthy {
			t.Error(s)
		}
	})
}

func TestSilenceBecomesUnknown(t *testing.T) {
	runLoop(t, t.TempDir(), func(l *loopTest) {
		l.send(watcherUp())
		advance(20 * time.Second)
		if s := l.state("0000:1b:00.0"); s != health.Healthy {
			t.Error(s)
		}
		advance(15 * time.Second)
		if s := l.state("0000:1b:00.0"); s != health.Unknown {
			t.Error(s)
		}
		if l.Stale(time.Now()) {
			t.Error("the loop does not tick")
		}
	})
}

func TestViewChangesBeforeItsReport(t *testing.T) {
	runLoop(t, t.TempDir(), func(l *loopTest) {
		l.send(watcherUp())
		advance(time.Second)
		changed := l.Changed()
		l.send(xidAt("0000:1b:00.0", 79))
		synctest.Wait()
		select {
		case <-changed:
		default:
			t.Error("Changed was not closed")
		}
		if s := l.state("0000:1b:00.0"); s != health.Unhealthy || len(l.changes) != 1 || len(l.gpus) != 2 {
			t.Errorf("%s, reported %+v on %v", s, l.changes, l.gpus)
		}
	})
}

// A new process must know the verdicts before it publishes, or its slices would lack taints.
func TestRestartKeepsVerdicts(t *testing.T) {
	dir := t.TempDir()
	runLoop(t, dir, func(l *loopTest) {
		l.send(watcherUp())
		l.send(xidAt("0000:1b:00.0", 79))
		advance(time.Second)
	})
	again := newLoop(t.Context(), dir)
	if s := again.state("0000:1b:00.0"); s != health.Unhealthy || again.flushes() != 0 {
		t.Errorf("after a restart it is %s, and %d reports repeat it", s, again.flushes())
	}
}

func TestOnlyTheLeaderSavesHealth(t *testing.T) {
	dir := t.TempDir()
	l := newLoop(t.Context(), dir)
	l.save(t.Context())
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 0 {
		t.Errorf("%q, %v", names, err)
	}
	l.SetLeader(false)
	l.SetLeader(true)
	l.isLeader = <-l.leader
	l.save(t.Context())
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 1 {
		t.Errorf("%q, %v", names, err)
	}
}

// The counters that prove a reset grow with each answer, and must survive a restart of the plugin.
// Saving each answer would wear out the node's disk.
func TestGrowingCountersAreSavedOnceAMinute(t *testing.T) {
	dir := t.TempDir()
	runLoop(t, dir, func(l *loopTest) {
		l.send(watcherUp())
		advance(2 * time.Second)
		saves, last := 0, []byte(nil)
		for range 180 {
			energy := uint64(time.Now().UnixMilli())
			l.send(device.Signal{Condition: &device.Condition{
				Card: device.Card{PCIAddress: "0000:1b:00.0"}, Reach: device.ReachOK, EnergyMillijoules: &energy, At: time.Now()}})
			advance(time.Second)
			content, err := os.ReadFile(filepath.Join(dir, "health.json"))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(content, last) {
				saves, last = saves+1, content
			}
		}
		if saves < 3 || saves > 5 {
			t.Errorf("%d saves in three minutes", saves)
		}
	})
}

func TestNodeAnnotationValidatesGPU(t *testing.T) {
	runLoop(t, t.TempDir(), func(l *loopTest) {
		gpu := readyWith("0000:1b:00.0").Node.GPUs[0].GPU
		annotate := func(value string) {
			node := &corev1.Node{}
			node.Annotations = map[string]string{"gpu.nvidia.com/validated-" + gpu.UUID: value}
			l.Observe(node)
			advance(time.Second)
		}
		for value, want := range map[string]bool{
			"": true, "yes": true,
			time.Now().Add(time.Hour).Format(time.RFC3339): true, // would outlive a reset
		} {
			annotate(value)
			if _, is := l.View().Unvalidated(gpu); is != want {
				t.Errorf("with the annotation %q the GPU is unvalidated: %v", value, is)
			}
		}
		annotate(time.Now().UTC().Format(time.RFC3339))
		if _, is := l.View().Unvalidated(gpu); is {
			t.Error("the check has no effect")
		}
	})
}

func TestLostGPUIsMissingUntilItIsUnplugged(t *testing.T) {
	listed := readyWith("0000:43:00.0")
	onBus, failed := readyWith("0000:43:00.0"), readyWith("0000:43:00.0")
	onBus.Node.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0"}}
	failed.Failure = "the scan failed"
	for name, c := range map[string]struct {
		snapshot inventory.Snapshot
		held     []string
		missing  bool
	}{
		"unplugged":                         {listed, nil, false},
		"a claim has it":                    {listed, []string{firstGPU}, true},
		"a claim has a part of it":          {listed, []string{firstGPU + "-mig-9-0"}, true},
		"a claim's record is unreadable":    {listed, []string{unreadable}, true},
		"a claim has another":               {listed, []string{"gpu-0000-43-00-0"}, false},
		"it is on the bus":                  {onBus, nil, true},
		"the scan failed":                   {failed, nil, true},
		"the driver is not ready":           {inventory.Snapshot{Known: true}, nil, true},
		"the only card was unplugged":       {inventory.Snapshot{Known: true, Empty: true}, nil, false},
		"the only card, and a claim has it": {inventory.Snapshot{Known: true, Empty: true}, []string{firstGPU}, true},
	} {
		t.Run(name, func(t *testing.T) {
			runLoop(t, t.TempDir(), func(l *loopTest) {
				l.send(watcherUp())
				l.send(xidAt("0000:1b:00.0", 79))
				advance(flushInterval)
				if missing := l.Missing(c.snapshot); (len(missing) == 1) != c.missing {
					t.Errorf("missing: %v", missing)
				}
			}, c.held...)
		})
	}
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
	runLoop(t, t.TempDir(), func(l *loopTest) {
		l.send(watcherUp())
		storm := func() (heap uint64, goroutines int) {
			for i := range 10_000 {
				l.send(xidAt("0000:1b:00.0", uint64(i%300)))
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

// The metrics of health come with a report. A GPU whose first answer was good before the scan found
// it changes no verdict.
func TestFoundGPUsAreReported(t *testing.T) {
	runLoop(t, t.TempDir(), func(l *loopTest) {
		l.send(device.Signal{Condition: &device.Condition{
			Card: device.Card{PCIAddress: "0000:52:00.0"}, Reach: device.ReachOK, At: time.Now(),
		}})
		advance(2 * tickInterval)
		l.inventory.Set(readyWith("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"))
		advance(2 * tickInterval)
		l.reports.mu.Lock()
		gpus := len(l.gpus)
		l.reports.mu.Unlock()
		if gpus != 3 {
			t.Errorf("the last report has %d GPUs, want 3", gpus)
		}
		before := l.flushes()
		advance(2 * tickInterval)
		if n := l.flushes() - before; n > 0 {
			t.Errorf("%d reports without a change", n)
		}
	})
}
