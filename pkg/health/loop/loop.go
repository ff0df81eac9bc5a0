// Package loop keeps the health verdicts of the node's devices up to date.
//
// One goroutine, [Loop.Run], evaluates what the hardware watcher reports, with a monitor of package
// health. It combines a burst of signals into one change. It saves findings on disk before it
// reports them, so after a kill, a new process knows everything that was reported. If that fails,
// it reports them nevertheless and saves them later. Only the leader saves them, since two plugin
// instances share the file.
//
// Readers get the verdicts from [Loop.View] without a lock. If the goroutine hangs, they become
// [Loop.Stale]. The package acts on no verdict: its reporter and its readers do.
package loop

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

const (
	// tickInterval is the interval at which the loop tells the monitor the current time, because some
	// verdicts change after a while.
	tickInterval = time.Second
	// saveInterval is how often the findings are saved while only their counts and times change.
	saveInterval = time.Minute
	// flushInterval is the minimum time between two flushes, in which the loop saves and reports
	// verdicts. A burst of signals is thus reported as one change.
	flushInterval = 100 * time.Millisecond
	// queueSize is how many signals the queue contains. If the queue is full, the sender waits, so no
	// signal is lost.
	queueSize = 1024
	// clearAnnotation is the Node's annotation in which an admin lists GPUs whose health problems are
	// to be forgotten, for example after a repair.
	clearAnnotation = device.DriverName + "/clear-health"
	// After staleAfter without a tick of the loop, its verdicts count as unknown.
	staleAfter = 30 * time.Second
)

// Inventory knows the node's GPUs as of the last scan.
type Inventory interface {
	Snapshot() inventory.Snapshot
	// RequestScan requests a full scan.
	RequestScan()
}

// Records lists the devices that claims hold.
type Records interface {
	List() ([]checkpoint.Entry, error)
}

// Reporter reports health changes. Its methods must not block.
type Reporter interface {
	// Report is called with changes once view, the verdicts after them, is what View returns. gpus are
	// the GPUs of the node, including unhealthy ones that the inventory no longer finds.
	Report(ctx context.Context, view *health.View, gpus []device.GPU, changes []health.Change)
	// Count is called with each tick. events has the number of hardware events since the last call.
	// eventFailure is the reason why no events arrive, or "".
	Count(events map[health.EventKey]uint64, eventFailure string)
	// NotCleared is called if an admin's request to clear health problems names unknown GPUs.
	NotCleared(message string)
}

// Options has the settings and the dependencies of a Loop.
type Options struct {
	// StateDir is the directory in which the findings are saved. BootID identifies the node's boot.
	StateDir, BootID string
	Inventory        Inventory
	Records          Records
	// InUse reports whether a claim has the GPU or a part of it.
	InUse    func(gpu string) (bool, error)
	Reporter Reporter
	// Watch watches the hardware and reports signals until the context ends.
	Watch func(ctx context.Context, report func(device.Signal)) error
}

// Loop has the health verdicts on the node's devices.
type Loop struct {
	opts  Options
	store health.Store

	signals       chan device.Signal
	leader        chan bool // whether this instance is the leader
	adminRequests chan adminRequests
	rules         chan health.Rules
	view          atomic.Pointer[health.View]
	lastTick      atomic.Int64 // in Unix nanoseconds

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
	// lastLent maps the GPUs that claims have for virtual machines to when their records last said so.
	lastLent map[device.PCIAddress]time.Time
	// remapGaps are the GPUs whose missing row remaps were logged.
	remapGaps map[device.PCIAddress]bool

	state // of the goroutine that evaluates signals
}

// state is used by one goroutine only: New, then Run.
type state struct {
	monitor *health.Monitor
	// flushed is the version of the monitor's verdicts that was last reported. saved is the version
	// that is on disk, since savedAt.
	flushed, saved uint64
	savedAt        time.Time
	nextFlush      time.Time           // earliest time of the next flush
	reported       []device.PCIAddress // the GPUs of the last report, sorted
	isLeader       bool
	lastSaveError  string // last logged error of save, or "" after a success
}

// New returns a Loop with the saved findings in its View, so that the first slices have their
// taints.
func New(ctx context.Context, o Options) *Loop {
	l := &Loop{
		opts:    o,
		store:   health.Store{Disk: durable.OS{}, Path: filepath.Join(o.StateDir, "health.json"), BootID: o.BootID},
		signals: make(chan device.Signal, queueSize), leader: make(chan bool, 1), adminRequests: make(chan adminRequests, 1),
		rules:   make(chan health.Rules, 1),
		changed: make(chan struct{}), lastLent: map[device.PCIAddress]time.Time{}, remapGaps: map[device.PCIAddress]bool{},
	}
	l.monitor = health.New(nil, time.Now())
	l.load(ctx)
	l.syncCards()
	l.monitor.Changes() // drop the saved findings, which were reported before the restart
	l.lastTick.Store(time.Now().UnixNano())
	l.flushed = l.monitor.Version()
	l.view.Store(l.monitor.View())
	return l
}

// View returns the current health verdicts.
func (l *Loop) View() *health.View { return l.view.Load() }

// Changed returns a channel that is closed at the next change of View.
func (l *Loop) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// setView makes v the View and closes the channel that Changed returned.
func (l *Loop) setView(v *health.View) {
	l.view.Store(v)
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// Stale reports whether the loop has not ticked for so long that its verdicts count as unknown.
func (l *Loop) Stale(now time.Time) bool {
	return now.Sub(time.Unix(0, l.lastTick.Load())) > staleAfter
}

// SetLeader tells the loop whether this plugin instance is the leader.
func (l *Loop) SetLeader(is bool) { replaceLatest(l.leader, is) }

// SetRules sets the admin's rules for XIDs, also for the findings that exist.
func (l *Loop) SetRules(rules health.Rules) { replaceLatest(l.rules, rules) }

// adminRequests are what the Node's annotations say about its GPUs.
type adminRequests struct {
	clear  string
	checks map[string]time.Time
}

// Observe carries out what admins request in annotations of the Node.
func (l *Loop) Observe(node *corev1.Node) {
	replaceLatest(l.adminRequests, adminRequests{node.Annotations[clearAnnotation], checksOf(node.Annotations, time.Now())})
}

// validatedPrefix begins the names of the Node's annotations that say when a check began which a
// GPU passed. The GPU's UUID follows.
const validatedPrefix = device.DriverName + "/validated-"

// checksOf returns the checks that GPUs passed, by UUID. It skips a time that is not RFC 3339, or
// that is in the future, because such a check would outlive the next reset.
func checksOf(annotations map[string]string, now time.Time) map[string]time.Time {
	checks := map[string]time.Time{}
	for name, value := range annotations {
		uuid, ok := strings.CutPrefix(name, validatedPrefix)
		if !ok {
			continue
		}
		if at, err := time.Parse(time.RFC3339, value); err == nil && !at.After(now) {
			checks[uuid] = at
		}
	}
	return checks
}

// replaceLatest sends v to the channel, which has room for one value. It drops a value that the
// loop has not read yet.
func replaceLatest[T any](latest chan T, v T) {
	for {
		select {
		case latest <- v:
			return
		case <-latest:
		}
	}
}

// Run evaluates signals until the context ends.
func (l *Loop) Run(ctx context.Context) {
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
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
		case rules := <-l.rules:
			l.monitor.SetRules(rules)
		case requests := <-l.adminRequests:
			l.clear(ctx, requests.clear)
			l.monitor.Validate(requests.checks)
		case now := <-tick.C:
			l.tick(ctx, now)
		case <-pause:
		}
		if l.flushed != l.monitor.Version() && !time.Now().Before(l.nextFlush) {
			l.flush(ctx)
		}
	}
}

// tick tells the monitor the current time, updates the event counts and retries a failed save. It
// reports GPUs that the inventory found or lost, because that alone changes no verdict.
func (l *Loop) tick(ctx context.Context, now time.Time) {
	gpus := l.syncCards()
	l.monitor.Tick(now)
	l.lastTick.Store(now.UnixNano())
	l.opts.Reporter.Count(l.monitor.Counts(), l.monitor.EventFailure())
	l.save(ctx)
	if !slices.Equal(addressesOf(gpus), l.reported) {
		l.flush(ctx)
	}
}

// addressesOf returns the GPUs' addresses, sorted.
func addressesOf(gpus []device.GPU) []device.PCIAddress {
	addresses := make([]device.PCIAddress, len(gpus))
	for i, g := range gpus {
		addresses[i] = g.PCIAddress
	}
	slices.Sort(addresses)
	return addresses
}

// clear makes the monitor forget the health problems of the GPUs that an admin's clear request
// names.
func (l *Loop) clear(ctx context.Context, request string) {
	l.syncCards() // the request may name a GPU that has sent no signal yet
	unknown := l.monitor.Clear(request, "an admin cleared it with the Node's annotation "+clearAnnotation, time.Now())
	if len(unknown) == 0 {
		return
	}
	klog.FromContext(ctx).Info("Ignored unknown GPUs in a request to clear health problems", "annotation", clearAnnotation, "names", unknown)
	l.opts.Reporter.NotCleared(fmt.Sprintf(
		"annotation %s names GPUs that this node does not have: %s; use PCI addresses, device names or UUIDs",
		clearAnnotation, strings.Join(unknown, ", ")))
}

// apply applies the signal s and those that are queued, so that a burst of signals is one change.
func (l *Loop) apply(s device.Signal) {
	for range queueSize {
		l.monitor.Apply(s, time.Now())
		select {
		case s = <-l.signals:
		default:
			return
		}
	}
	l.monitor.Apply(s, time.Now())
}

// flush saves the findings on disk, sets the new View and reports the changes, in this order.
func (l *Loop) flush(ctx context.Context) {
	l.nextFlush = time.Now().Add(flushInterval)
	gpus := l.syncCards()
	version, view := l.monitor.Version(), l.monitor.View()
	l.save(ctx)
	l.setView(view)
	l.flushed, l.reported = version, addressesOf(gpus)
	l.opts.Reporter.Report(ctx, view, gpus, l.monitor.Changes())
}

// save writes the findings to disk if this plugin instance is the leader: when a verdict may have
// changed, and otherwise once in saveInterval. If that fails, the next tick tries again.
func (l *Loop) save(ctx context.Context) {
	version, now := l.monitor.Version(), time.Now()
	if !l.isLeader || version == l.saved && now.Sub(l.savedAt) < saveInterval {
		return
	}
	if err := l.store.Save(l.monitor); err != nil {
		if err.Error() != l.lastSaveError {
			l.lastSaveError = err.Error()
			klog.FromContext(ctx).Error(err, "Failed to persist health state")
		}
		return
	}
	l.saved, l.savedAt, l.lastSaveError = version, now, ""
}

func (l *Loop) load(ctx context.Context) {
	if err := l.store.Load(l.monitor, time.Now()); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to load saved health state; starting without it")
	}
}
