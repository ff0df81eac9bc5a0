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
	// replaceLimit bounds how long a replacement may take to listen to all cards. Later it takes over
	// all the same if it has NVML: it reports itself which cards it cannot hear.
	replaceLimit = 20 * time.Second
	// hearingApart is how much later than one process another may receive the same event.
	hearingApart = 200 * time.Millisecond
)

// errExcluded says that all cards of this watcher are excluded.
var errExcluded = errors.New("the GPU is excluded from the watch while its MIG mode changes")

// errNotReplaced says that the watch starts anew, because nobody took over without a gap.
var errNotReplaced = errors.New("no process took over the watch of the other GPUs while the MIG mode of one changes")

// replacement is a watcher process that is to follow the current one.
type replacement struct {
	child *watchChild // nil if it could not be started
	epoch string
	held  []device.Signal // what it has said so far
	err   error           // why it cannot take over
}

func (r replacement) abandon() {
	if r.child != nil {
		r.child.replaced = true
		r.child.end()
	}
}

// starting is a replacement that is not ready yet.
type starting struct {
	ready    <-chan replacement // nil while none starts
	cancel   context.CancelFunc
	coverage *coverage // nil if it could not be started
}

func (s starting) abandon() {
	if s.ready != nil {
		s.cancel()
		(<-s.ready).abandon()
	}
}

// start starts a watcher process for all cards that are not excluded.
func (w *watcher) start() (*watchChild, error) {
	if !w.excluded.leaves(w.cards()) {
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
		return nil, fmt.Errorf("start the process that watches the GPUs: %w", err)
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

// cards are those that this watcher is for, as far as the PCI bus shows them.
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

// hiddenNodes are the device nodes of excluded cards. NVML may open every GPU that it sees.
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

// startHiding starts a process that cannot open these device nodes. If hiding fails, it starts the
// process all the same: the order it gets does not name these cards.
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

// setHangingApart has cards that hang watched by processes of their own. Otherwise each replacement
// would leave a process that hangs with them.
func (w *watcher) setHangingApart(ctx context.Context) {
	for _, a := range slices.Clone(w.hanging) {
		if len(w.apart) < maxApart && !slices.Contains(w.apart, a) && !w.excluded.has(a) {
			w.setApart(ctx, a)
		}
	}
}

// startReplacement delivers the replacement when it listens, or when it has failed.
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

// await returns when the replacement listens to all its cards.
func (r replacement) await(ctx context.Context) replacement {
	limit := time.NewTimer(replaceLimit)
	defer limit.Stop()
	for {
		select {
		case s := <-r.child.signals:
			r.held = append(r.held, s)
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				return r
			}
		case <-r.child.ended:
			r.err = r.child.failure()
			return r
		case <-limit.C:
			if len(r.held) == 0 {
				r.err = fmt.Errorf("NVML has not started for %s", replaceLimit)
			}
			return r
		case <-ctx.Done():
			r.err = ctx.Err()
			return r
		}
	}
}

// handOver ends the current watcher process and emits what its replacement has said meanwhile.
func (w *watcher) handOver(from *watchChild, epoch string, to replacement) {
	from.replaced = true
	w.part(from, epoch)
	w.overlap.until = time.Now()
	w.hanging = nil
	for _, s := range to.held {
		w.pass(s, to.epoch)
	}
}

// overlap drops events that two watcher processes have both received. It never drops an event that
// only one has received, unless the other has received the same kind of event in that time.
type overlap struct {
	heard map[eventKey]int // by the process that is replaced
	until time.Time        // when that process ended, zero before
}

// repeated subtracts what was emitted before from an event's count. It reports whether nothing is left.
func (o *overlap) repeated(e *device.HealthEvent) bool {
	if o.heard == nil {
		return false
	}
	key, count := keyOf(*e), max(e.Count, 1)
	if o.until.IsZero() {
		o.heard[key] += count
		return false
	}
	if e.At.After(o.until.Add(hearingApart)) {
		return false
	}
	before := min(o.heard[key], count)
	o.heard[key] -= before
	e.Count = count - before
	return e.Count == 0
}
