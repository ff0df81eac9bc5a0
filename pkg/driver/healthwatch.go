package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

const (
	// healthTick is how often time passes for verdicts, calmTick how often where it would change none: somewhat more than is between two answers of the
	// hardware, with which it passes too.
	healthTick = time.Second
	calmTick   = 6 * time.Second
	// healthPause is how long after one change of verdicts the next is told at the earliest: a burst is told as a few.
	healthPause = 100 * time.Millisecond
	// healthBacklog is how many signals may wait to be judged. Who tells them waits if there are more: none is lost.
	healthBacklog = 1024
	// clearAnnotation of the Node names GPUs that an admin takes for well.
	clearAnnotation = DriverName + "/clear-health"
	// healthStale is how long a verdict may be the last one that was thought about.
	healthStale = 30 * time.Second
)

// NewWatch listens to the node's hardware: NVML in a child process of its own, which makes room for
// what partitions do.
func NewWatch(cfg *config.Config, partitions *nvidia.Partitions) (func(ctx context.Context, tell func(device.Signal)) error, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the plugin's own binary, which listens to the hardware in a child process: %w", err)
	}
	options := nvidia.WatchOptions{Paths: Paths(cfg), Command: []string{executable, nvidia.WatchCommand}, Partitions: partitions}
	return func(ctx context.Context, tell func(device.Signal)) error { return nvidia.Watch(ctx, options, tell) }, nil
}

// healthWatch owns the verdicts on this node's devices: it has signals judged, keeps what was found on the disk, and then tells everybody else.
//
// One goroutine does all of it, in this order, so that a plugin that is killed anywhere comes back with what it had told. Readers take the current view.
type healthWatch struct {
	effects health.Effects
	rules   health.Rules
	store   health.Store
	inv     inventorySource
	// tell is called with what came and went, after the new view is there. It must not wait for anybody.
	tell func(ctx context.Context, changes []health.Change)
	// count is called about every second while there is something to tell with how many events came, and why none would be heard now.
	count func(events map[health.Counted]uint64, deaf string)
	// inUse says whether a claim holds any part of the card.
	inUse func(gpu string) bool
	// wrong says what an admin asked for and cannot have.
	wrong func(message string)

	signals chan device.Signal
	turn    chan bool // whether this instance publishes
	clears  chan string
	view    atomic.Pointer[health.View]
	beat    atomic.Int64 // when verdicts were last thought about, in Unix nanoseconds

	mu      sync.Mutex
	waiting chan struct{} // closed with the next change
}

func newHealthWatch(effects health.Effects, rules health.Rules, stateDir, bootID string, inv inventorySource) *healthWatch {
	return &healthWatch{
		effects: effects, rules: rules,
		store:   health.Store{Disk: durable.OS{}, Path: filepath.Join(stateDir, "health.json"), BootID: bootID},
		inv:     inv,
		signals: make(chan device.Signal, healthBacklog),
		turn:    make(chan bool, 1),
		clears:  make(chan string, 1),
		waiting: make(chan struct{}),
	}
}

// View is what is known now. It is nil on a node on which nobody listens.
func (h *healthWatch) View() *health.View { return h.view.Load() }

// Changed is closed with the next change of a verdict, or of what claims have lost.
func (h *healthWatch) Changed() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.waiting
}

// announce wakes those who wait for a change.
func (h *healthWatch) announce() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.waiting)
	h.waiting = make(chan struct{})
}

// Stale says that nobody has thought about the verdicts for too long.
func (h *healthWatch) Stale(now time.Time) bool {
	return h.view.Load() != nil && now.Sub(time.Unix(0, h.beat.Load())) > healthStale
}

// Told takes a signal. It waits while too many wait to be judged.
func (h *healthWatch) Told(ctx context.Context, s device.Signal) {
	select {
	case h.signals <- s:
	case <-ctx.Done():
	}
}

// Publishes says whether this instance is the one that tells others, and keeps what is on the disk.
func (h *healthWatch) Publishes(is bool) {
	for {
		select {
		case h.turn <- is:
			return
		case <-h.turn: // the latest counts
		}
	}
}

// Clear takes what an admin asks for on the Node.
func (h *healthWatch) Clear(asked string) {
	for {
		select {
		case h.clears <- asked:
			return
		case <-h.clears: // the latest counts
		}
	}
}

// judge is what the goroutine of a healthWatch has.
type judge struct {
	*healthWatch
	monitor *health.Monitor
	// told is the version of the verdicts that was last told, saved the edition that is on the disk.
	told, saved uint64
	next        time.Time // when something may be told again
	publishes   bool
	unsaved     string // why the verdicts could not be saved, when that was last said
}

// begin reads what was known before the restart. From then on there is a view.
func (h *healthWatch) begin(ctx context.Context) *judge {
	j := &judge{healthWatch: h, monitor: health.New(health.Options{Rules: h.rules}, time.Now())}
	j.load(ctx)
	j.expect()
	j.monitor.Changes() // what was told before the restart
	h.view.Store(j.monitor.View())
	h.beat.Store(time.Now().UnixNano())
	j.told = j.monitor.Version()
	return j
}

// Run judges until the context ends.
func (j *judge) Run(ctx context.Context) {
	tick := time.NewTimer(healthTick)
	defer tick.Stop()
	ticked := time.Now()
	for {
		var pause <-chan time.Time
		if j.told != j.monitor.Version() {
			pause = time.After(time.Until(j.next))
		}
		select {
		case <-ctx.Done():
			j.save(ctx)
			return
		case s := <-j.signals:
			j.judge(s)
		case j.publishes = <-j.turn:
			j.load(ctx) // what the instance before saw last
		case asked := <-j.clears:
			j.clear(ctx, asked)
		case <-tick.C:
		case <-pause:
		}
		now := time.Now()
		if now.Sub(ticked) >= healthTick {
			j.tick(ctx, now)
			ticked = now
		}
		tick.Reset(j.betweenTicks(now) - now.Sub(ticked))
		if j.told != j.monitor.Version() && !time.Now().Before(j.next) {
			j.flush(ctx)
		}
	}
}

// tick lets time pass.
func (j *judge) tick(ctx context.Context, now time.Time) {
	j.expect()
	j.monitor.Tick(now)
	j.beat.Store(now.UnixNano())
	j.count(j.monitor.Counts(), j.monitor.Deaf())
	j.save(ctx) // again, if that failed
}

// betweenTicks is how long may be between two ticks, if nothing is said meanwhile.
func (j *judge) betweenTicks(now time.Time) time.Duration {
	if j.monitor.Calm(now, calmTick) && (!j.publishes || j.saved == j.monitor.Edition()) {
		return calmTick
	}
	return healthTick
}

// clear does what an admin asks for, once.
func (j *judge) clear(ctx context.Context, asked string) {
	j.expect() // cards that nothing was said of yet
	unknown := j.monitor.Clear(asked, "an admin says so, by the Node's annotation "+clearAnnotation, time.Now())
	if len(unknown) == 0 {
		return
	}
	klog.FromContext(ctx).Info("What is to be cleared is no GPU of this node", "annotation", clearAnnotation, "names", unknown)
	j.wrong(fmt.Sprintf("annotation %s names what is no GPU of this node: %s", clearAnnotation, strings.Join(unknown, ", ")))
}

// judge takes all signals that have come: a burst is one change.
func (j *judge) judge(s device.Signal) {
	for range healthBacklog {
		j.monitor.Apply(s, time.Now())
		select {
		case s = <-j.signals:
		default:
			return
		}
	}
	j.monitor.Apply(s, time.Now())
}

// expect says which cards there are, and forgets those that are gone for good.
func (j *judge) expect() {
	s := j.inv.Snapshot()
	if !s.Known {
		return
	}
	gpus := make([]device.GPU, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		gpus[i] = g.GPU
	}
	j.monitor.Expect(gpus, time.Now())
	missing, _ := j.View().Missing(listed(s), time.Now())
	for _, g := range missing {
		if j.gone(s, g) {
			j.monitor.Forget(g.PCIAddress)
		}
	}
}

// gone says of a card that is missing whether it was taken out and nobody asks for it. While the driver is away it may come back with it.
func (h *healthWatch) gone(s inventory.Snapshot, g device.GPU) bool {
	return (s.Ready || s.Empty) && s.Failure == "" && !onBus(s, g.PCIAddress) && !h.inUse(g.WholeName())
}

// flush tells what has changed, first the disk and then the world.
func (j *judge) flush(ctx context.Context) {
	j.next = time.Now().Add(healthPause)
	version := j.monitor.Version()
	j.save(ctx)
	j.view.Store(j.monitor.View())
	j.told = version
	j.tell(ctx, j.monitor.Changes())
	j.announce()
}

// save writes what is known, if this instance is the one to do so. What could not be written is tried again; verdicts hold all the same.
func (j *judge) save(ctx context.Context) {
	if !j.publishes || j.saved == j.monitor.Edition() {
		return
	}
	edition := j.monitor.Edition()
	if err := j.store.Save(j.monitor); err != nil {
		if err.Error() != j.unsaved {
			j.unsaved = err.Error()
			klog.FromContext(ctx).Error(err, "Verdicts on GPUs would not outlive a restart of the plugin")
		}
		return
	}
	j.saved, j.unsaved = edition, ""
}

func (j *judge) load(ctx context.Context) {
	if err := j.store.Load(j.monitor, time.Now()); err != nil {
		klog.FromContext(ctx).Error(err, "What was known of the health of this node's GPUs before the start is lost")
	}
}

// listed are the addresses of the cards that a snapshot has.
func listed(s inventory.Snapshot) []device.PCIAddress {
	addresses := make([]device.PCIAddress, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		addresses[i] = g.PCIAddress
	}
	return addresses
}

// onBus says whether a card that cannot be offered is still there.
func onBus(s inventory.Snapshot, address device.PCIAddress) bool {
	for _, p := range s.Node.Problems {
		if p.PCIAddress == address {
			return true
		}
	}
	return false
}
