package nvidia

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"runtime"
	"slices"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// replaceLimit bounds how long the old watcher process waits until its replacement receives the
	// events of all cards. After that a replacement that has started NVML takes over anyway, and
	// reports from which cards it receives no events.
	replaceLimit = 20 * time.Second
	// maxReceiveSkew is how much later than the old watcher process its replacement may receive the
	// same event.
	maxReceiveSkew = 200 * time.Millisecond
)

// errExcluded says that a watcher has no card to watch, because all its cards are excluded from the
// watch.
var errExcluded = errors.New("the GPU is excluded from the watch while its MIG mode changes")

// errNotReplaced says that the watch restarts with a gap, because the replacement process failed.
var errNotReplaced = errors.New("no process took over the watch of the other GPUs while the MIG mode of one changes")

// replacement is a watcher process that takes over from the current watcher process.
type replacement struct {
	child   *watchChild // nil if the process could not be started
	epoch   string
	signals []device.Signal // signals that child has sent so far
	err     error           // why child cannot take over
}

func (r replacement) abandon() {
	if r.child != nil {
		r.child.replaced = true
		r.child.kill()
	}
}

// starting is a replacement that does not receive events yet.
type starting struct {
	ready    <-chan replacement // nil while no replacement starts
	cancel   context.CancelFunc
	coverage *coverage // nil if the process could not be started
}

func (s starting) abandon() {
	if s.ready != nil {
		s.cancel()
		(<-s.ready).abandon()
	}
}

// start starts a watcher process for all cards of this watcher that are not excluded. If none is
// left, it returns errExcluded.
func (w *watcher) start() (*watchChild, error) {
	if !w.excluded.leavesAny(w.cards()) {
		return nil, errExcluded
	}
	c, ok := w.excluded.begin(w.only)
	if !ok {
		return nil, errExcluded
	}
	order := watchOrder{
		Paths: w.options.Paths, Interval: w.options.Interval, Wedged: w.wedged,
		Except: append(slices.Clone(w.apart), slices.Sorted(maps.Keys(c.except))...),
	}
	if w.only != "" {
		order.Only = []device.PCIAddress{w.only}
	}
	child, err := startWatchChild(w.options.Command, order, w.hiddenNodes(c))
	if err != nil {
		w.excluded.end(c)
		return nil, fmt.Errorf("start the watcher process: %w", err)
	}
	child.coverage = c
	w.excluded.started(c, child.process.Pid)
	w.children = append(w.children, child)
	go func() {
		select {
		case <-child.stop:
			w.excluded.kill(c)
		case <-child.gone:
		}
		<-child.gone
		w.excluded.end(c)
	}()
	return child, nil
}

// cards lists the cards on the PCI bus that belong to this watcher, including those that are
// excluded now.
func (w *watcher) cards() []device.PCIAddress {
	if w.only != "" {
		return []device.PCIAddress{w.only}
	}
	sysfs := w.options.Paths.withDefaults().Sysfs
	found, err := pciGPUs(sysfs)
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(found, func(a device.PCIAddress) bool {
		driver := pciDriver(sysfs, a)
		return driver != "" && driver != nvidiaDriver || slices.Contains(w.apart, a)
	})
}

// hiddenNodes lists the device nodes of the cards that c excludes. They must be hidden, because
// NVML may open every GPU whose device node it can open.
func (w *watcher) hiddenNodes(c *coverage) []string {
	if len(c.except) == 0 {
		return nil
	}
	hidden := map[string]bool{}
	for _, e := range c.except {
		hidden[fmt.Sprintf("nvidia%d", e.minor)] = true
	}
	devRoot := w.options.Paths.withDefaults().devRoot()
	return onecard.Others(devRoot, func(name string) bool { return !hidden[name] })
}

// startHiding starts command so that it cannot open the device nodes in nodes. If hiding fails, it
// starts command anyway: the process does not watch these cards, although NVML may open them.
func startHiding(command *exec.Cmd, nodes []string) error {
	if len(nodes) == 0 {
		return command.Start()
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		_ = onecard.Hide(nodes)
		started <- command.Start()
	}()
	return <-started
}

// watchHangingApart gives each hung card its own watcher process, up to maxApart. Otherwise each
// replacement for all cards would leave one more process that hangs in the driver.
func (w *watcher) watchHangingApart(ctx context.Context) {
	for _, a := range slices.Clone(w.hanging) {
		if len(w.apart) < maxApart && !slices.Contains(w.apart, a) && !w.excluded.has(a) {
			w.watchApart(ctx, a)
		}
	}
}

// startReplacement starts a replacement process. The channel ready of the result gets the
// replacement when it receives events or has failed.
func (w *watcher) startReplacement(ctx context.Context) starting {
	ctx, cancel := context.WithCancel(ctx)
	ready := make(chan replacement, 1)
	next := starting{ready: ready, cancel: cancel}
	w.children = slices.DeleteFunc(w.children, (*watchChild).hasEnded)
	if n := len(w.children) - 1; n >= maxStuck {
		ready <- replacement{err: stuckError(n)}
		return next
	}
	w.overlap = overlap{heard: map[eventKey]int{}}
	r := replacement{epoch: driverLoad(w.options.Paths)}
	if r.child, r.err = w.start(); r.err != nil {
		ready <- r
		return next
	}
	next.coverage = r.child.coverage
	go func() { ready <- r.await(ctx) }()
	return next
}

// await returns when the replacement receives the events of all its cards, when it has failed, when
// replaceLimit has passed, or when ctx ends. The err of the result says why the replacement cannot
// take over.
func (r replacement) await(ctx context.Context) replacement {
	limit := time.NewTimer(replaceLimit)
	defer limit.Stop()
	for {
		select {
		case s := <-r.child.signals:
			r.signals = append(r.signals, s)
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				return r
			}
		case <-r.child.ended:
			r.err = r.child.failure()
			return r
		case <-limit.C:
			if len(r.signals) == 0 {
				r.err = fmt.Errorf("NVML has not started after %s", replaceLimit)
			}
			return r
		case <-ctx.Done():
			r.err = ctx.Err()
			return r
		}
	}
}

// handOver ends the old watcher process, which is the parameter from, after it has sent its last
// events. It then emits the signals that the replacement has sent so far.
func (w *watcher) handOver(from *watchChild, epoch string, to replacement) {
	from.replaced = true
	w.drainAndKill(from, epoch)
	w.overlap.until = time.Now()
	w.hanging = nil
	for _, s := range to.signals {
		w.forward(s, to.epoch)
	}
}

// overlap drops events that both the old watcher process and its replacement received. It keeps an
// event that only one of them received, unless the other one received an equal event while both
// ran.
type overlap struct {
	heard map[eventKey]int // events that the old process received
	until time.Time        // when the old process ended, zero before that
}

// repeated subtracts from the count of e the equal events that the old process already emitted. If
// none is left, it returns true, and the caller drops e.
func (o *overlap) repeated(e *device.HealthEvent) bool {
	if o.heard == nil {
		return false
	}
	key, count := keyOf(*e), max(e.Count, 1)
	if o.until.IsZero() {
		o.heard[key] += count
		return false
	}
	if e.At.After(o.until.Add(maxReceiveSkew)) {
		return false
	}
	before := min(o.heard[key], count)
	o.heard[key] -= before
	e.Count = count - before
	return e.Count == 0
}
