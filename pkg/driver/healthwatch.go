package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
)

const (
	// healthTick is the interval at which the health loop tells the health monitor the current time,
	// because some verdicts change after a while.
	healthTick = time.Second
	// idleTick replaces healthTick while no verdict can change by time alone. It is longer than the
	// pause between two answers of the hardware watcher, because each answer also tells the monitor
	// the current time.
	idleTick = 6 * time.Second
	// healthFlushInterval is the minimum time between two flushes, in which the health loop saves and
	// reports verdicts. A burst of signals is thus reported as one change.
	healthFlushInterval = 100 * time.Millisecond
	// healthQueueSize is how many signals the queue contains. If the queue is full, the sender waits,
	// so no signal is lost.
	healthQueueSize = 1024
	// clearAnnotation is the Node's annotation in which an admin lists GPUs whose health problems are
	// to be forgotten, for example after a repair.
	clearAnnotation = DriverName + "/clear-health"
	// After healthStale without a tick of the health loop, its verdicts count as unknown.
	healthStale = 30 * time.Second
)

// NewWatch returns a function that watches the node's hardware with NVML in a child process. That
// process pauses while partitions are changed.
func NewWatch(cfg *config.Config, partitions *cut.Partitions) (func(ctx context.Context, report func(device.Signal)) error, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the plugin's own binary for the process that watches the hardware: %w", err)
	}
	options := watch.Options{Paths: Paths(cfg), Command: []string{executable, watch.Command}, Partitions: partitions}
	return func(ctx context.Context, report func(device.Signal)) error { return watch.Run(ctx, options, report) }, nil
}

// healthWatch has the health verdicts on this node's devices. Only the goroutine of the health loop
// changes them. That goroutine saves the health problems on disk before it reports changes, so
// after a kill, a new process knows everything that was reported.
type healthWatch struct {
	effects health.Effects
	rules   health.Rules
	store   health.Store
	inv     inventorySource
	// onChange is called with the changes when they are visible in View. It must not block.
	onChange func(ctx context.Context, changes []health.Change)
	// onCounts is called with each tick. events has the number of hardware events. eventFailure is the
	// reason why no events arrive, or "".
	onCounts func(events map[health.EventKey]uint64, eventFailure string)
	// inUse reports whether a claim holds the GPU with this name or a part of it.
	inUse func(gpu string) bool
	// onInvalid is called with a message if an admin's clear request names unknown GPUs.
	onInvalid func(message string)

	signals       chan device.Signal
	leader        chan bool // whether this instance is the leader
	clearRequests chan string
	view          atomic.Pointer[health.View]
	lastTick      atomic.Int64 // in Unix nanoseconds

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
}

func newHealthWatch(effects health.Effects, rules health.Rules, stateDir, bootID string, inv inventorySource) *healthWatch {
	return &healthWatch{
		effects: effects, rules: rules,
		store:         health.Store{Disk: durable.OS{}, Path: filepath.Join(stateDir, "health.json"), BootID: bootID},
		inv:           inv,
		signals:       make(chan device.Signal, healthQueueSize),
		leader:        make(chan bool, 1),
		clearRequests: make(chan string, 1),
		changed:       make(chan struct{}),
	}
}

// View returns the current health verdicts. It is nil on a node without a hardware watcher.
func (h *healthWatch) View() *health.View { return h.view.Load() }

// Changed returns a channel that is closed at the next change of a verdict.
func (h *healthWatch) Changed() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changed
}

// notifyChanged closes the channel that Changed returned, and creates the next one.
func (h *healthWatch) notifyChanged() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
}

// Stale reports whether the health loop has not ticked for so long that its verdicts count as
// unknown.
func (h *healthWatch) Stale(now time.Time) bool {
	return h.view.Load() != nil && now.Sub(time.Unix(0, h.lastTick.Load())) > healthStale
}

// Enqueue queues a signal for the health loop. It blocks while the queue is full.
func (h *healthWatch) Enqueue(ctx context.Context, s device.Signal) {
	select {
	case h.signals <- s:
	case <-ctx.Done():
	}
}

// SetLeader tells the health loop whether this plugin instance is the leader. Only the leader saves
// the health problems on disk.
func (h *healthWatch) SetLeader(is bool) {
	for {
		select {
		case h.leader <- is:
			return
		case <-h.leader: // keep only the latest value
		}
	}
}

// Clear queues the admin's clear request, the value of the Node's annotation, for the health loop.
func (h *healthWatch) Clear(request string) {
	for {
		select {
		case h.clearRequests <- request:
			return
		case <-h.clearRequests: // keep only the latest request
		}
	}
}

// healthLoop is the state of the goroutine that evaluates signals. Only that goroutine uses it.
type healthLoop struct {
	*healthWatch
	monitor *health.Monitor
	// flushed is the version of the monitor's verdicts that was last reported. saved is the version of
	// the monitor's health problems that is on disk.
	flushed, saved uint64
	nextFlush      time.Time // earliest time of the next flush
	isLeader       bool
	lastSaveError  string // last logged error of save, or "" after a success
}

// newLoop returns a health loop that starts with the health problems saved on disk, and sets the
// first View.
func (h *healthWatch) newLoop(ctx context.Context) *healthLoop {
	l := &healthLoop{healthWatch: h, monitor: health.New(health.Options{Rules: h.rules}, time.Now())}
	l.load(ctx)
	l.syncCards()
	l.monitor.Changes() // drop the saved findings, which were reported before the restart
	h.view.Store(l.monitor.View())
	h.lastTick.Store(time.Now().UnixNano())
	l.flushed = l.monitor.Version()
	return l
}

// Run applies signals until the context ends.
func (l *healthLoop) Run(ctx context.Context) {
	tick := time.NewTimer(healthTick)
	defer tick.Stop()
	ticked := time.Now()
	for {
		var pause <-chan time.Time
		if l.flushed != l.monitor.Version() {
			pause = time.After(time.Until(l.nextFlush))
		}
		select {
		case <-ctx.Done():
			l.save(ctx)
			return
		case s := <-l.signals:
			l.apply(s)
		case l.isLeader = <-l.leader:
			l.load(ctx) // the previous leader's last findings
		case request := <-l.clearRequests:
			l.clear(ctx, request)
		case <-tick.C:
		case <-pause:
		}
		now := time.Now()
		if now.Sub(ticked) >= healthTick {
			l.tick(ctx, now)
			ticked = now
		}
		tick.Reset(l.tickInterval(now) - now.Sub(ticked))
		if l.flushed != l.monitor.Version() && !time.Now().Before(l.nextFlush) {
			l.flush(ctx)
		}
	}
}

// tick tells the monitor the current time, updates the event counts and retries a failed save.
func (l *healthLoop) tick(ctx context.Context, now time.Time) {
	l.syncCards()
	l.monitor.Tick(now)
	l.lastTick.Store(now.UnixNano())
	l.onCounts(l.monitor.Counts(), l.monitor.EventFailure())
	l.save(ctx) // retries a failed save
}

// tickInterval returns the time between the last tick and the next one: idleTick if time alone
// changes no verdict and all health problems are saved on disk, else healthTick.
func (l *healthLoop) tickInterval(now time.Time) time.Duration {
	if l.monitor.StableFor(now, idleTick) && (!l.isLeader || l.saved == l.monitor.SaveVersion()) {
		return idleTick
	}
	return healthTick
}

// clear makes the health monitor forget the health problems of the GPUs that an admin's clear
// request names.
func (l *healthLoop) clear(ctx context.Context, request string) {
	l.syncCards() // the request may name a GPU that has sent no signal yet
	unknown := l.monitor.Clear(request, "an admin cleared it with the Node's annotation "+clearAnnotation, time.Now())
	if len(unknown) == 0 {
		return
	}
	klog.FromContext(ctx).Info("Ignored unknown GPUs in a request to clear health problems", "annotation", clearAnnotation, "names", unknown)
	l.onInvalid(fmt.Sprintf("annotation %s names GPUs that this node does not have: %s; use PCI addresses, device names or UUIDs",
		clearAnnotation, strings.Join(unknown, ", ")))
}

// apply applies the signal s and those that are queued, so that a burst of signals is one change.
func (l *healthLoop) apply(s device.Signal) {
	for range healthQueueSize {
		l.monitor.Apply(s, time.Now())
		select {
		case s = <-l.signals:
		default:
			return
		}
	}
	l.monitor.Apply(s, time.Now())
}

// syncCards adds the inventory's GPUs to the health monitor. It removes GPUs from the monitor that
// were unplugged and that no claim holds.
func (l *healthLoop) syncCards() {
	s := l.inv.Snapshot()
	if !s.Known {
		return
	}
	gpus := make([]device.GPU, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		gpus[i] = g.GPU
	}
	l.monitor.Expect(gpus, time.Now())
	missing, _ := l.View().Missing(snapshotAddresses(s), time.Now())
	for _, g := range missing {
		if l.removedForGood(s, g) {
			l.monitor.Forget(g.PCIAddress)
		}
	}
}

// Missing returns the unhealthy GPUs that s lacks, except those that were unplugged and that no
// claim holds.
func (h *healthWatch) Missing(s inventory.Snapshot) []device.GPU {
	missing, _ := h.View().Missing(snapshotAddresses(s), time.Now())
	return slices.DeleteFunc(missing, func(g device.GPU) bool { return h.removedForGood(s, g) })
}

// removedForGood reports whether the GPU g, which the inventory no longer finds, was unplugged and
// no claim holds it. While the GPU driver is not ready, the answer is false, because g may come
// back together with the driver.
func (h *healthWatch) removedForGood(s inventory.Snapshot, g device.GPU) bool {
	return (s.Ready || s.Empty) && s.Failure == "" && !onBus(s, g.PCIAddress) && !h.inUse(g.WholeName())
}

// flush saves the health problems on disk, sets the new View and reports the changes, in this
// order.
func (l *healthLoop) flush(ctx context.Context) {
	l.nextFlush = time.Now().Add(healthFlushInterval)
	version := l.monitor.Version()
	l.save(ctx)
	l.view.Store(l.monitor.View())
	l.flushed = version
	l.onChange(ctx, l.monitor.Changes())
	l.notifyChanged()
}

// save writes the health problems to disk if this plugin instance is the leader. If that fails, the
// next tick tries again.
func (l *healthLoop) save(ctx context.Context) {
	if !l.isLeader || l.saved == l.monitor.SaveVersion() {
		return
	}
	edition := l.monitor.SaveVersion()
	if err := l.store.Save(l.monitor); err != nil {
		if err.Error() != l.lastSaveError {
			l.lastSaveError = err.Error()
			klog.FromContext(ctx).Error(err, "Failed to persist health state")
		}
		return
	}
	l.saved, l.lastSaveError = edition, ""
}

func (l *healthLoop) load(ctx context.Context) {
	if err := l.store.Load(l.monitor, time.Now()); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to load saved health state; starting without it")
	}
}

// snapshotAddresses returns the PCI addresses of the snapshot's GPUs.
func snapshotAddresses(s inventory.Snapshot) []device.PCIAddress {
	addresses := make([]device.PCIAddress, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		addresses[i] = g.PCIAddress
	}
	return addresses
}

// onBus reports whether the GPU at this PCI address is plugged in but cannot be offered.
func onBus(s inventory.Snapshot, address device.PCIAddress) bool {
	for _, p := range s.Node.Problems {
		if p.PCIAddress == address {
			return true
		}
	}
	return false
}
