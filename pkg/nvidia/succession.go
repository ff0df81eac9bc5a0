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

// heirLimit is how long a child may take until it listens. After that it follows all the same if it has NVML: it says itself of whom it hears nothing.
const heirLimit = 20 * time.Second

// hearingApart is how much later than one child another may hear of the same event.
const hearingApart = 200 * time.Millisecond

// errAway says that the one card of this watcher is away.
var errAway = errors.New("the GPU is left alone for now")

// heir is a child that listens, or will never, while the one before it is still at work.
type heir struct {
	child *watchChild // nil if it could not be started
	epoch string
	held  []device.Signal // what it said until then
	err   error           // why it is of no use
}

func (h heir) abandon() {
	if h.child != nil {
		h.child.end()
	}
}

// start starts a child for the cards that are not away.
func (w *watcher) start() (*watchChild, error) {
	h, may := w.absent.begin(w.only)
	if !may {
		return nil, errAway
	}
	order := watchOrder{
		Paths: w.options.Paths, Interval: w.options.Interval, Wedged: w.wedged, Except: append(slices.Clone(w.apart), slices.Sorted(maps.Keys(h.except))...),
	}
	if w.only != "" {
		order.Only = []device.PCIAddress{w.only}
	}
	child, err := startWatchChild(w.options.Command, order, w.hidden(h))
	if err != nil {
		w.absent.end(h)
		return nil, fmt.Errorf("start the process that watches the GPUs: %w", err)
	}
	child.holding = h
	w.absent.started(h, child.process.Pid)
	w.children = append(w.children, child)
	go func() {
		<-child.gone
		w.absent.end(h)
	}()
	return child, nil
}

// hidden are the device nodes of the cards that are away: NVML opens what it sees.
func (w *watcher) hidden(h *holding) []string {
	if len(h.except) == 0 {
		return nil
	}
	away := map[string]bool{}
	for _, a := range h.except {
		away[fmt.Sprintf("nvidia%d", a.minor)] = true
	}
	return onecard.Others(w.options.Paths.withDefaults().devRoot(), func(name string) bool { return !away[name] })
}

// startWithout starts a process that cannot open these nodes. Where they cannot be hidden it is started all the same: it has no reason to open them.
func startWithout(command *exec.Cmd, nodes []string) error {
	if len(nodes) == 0 {
		return command.Start()
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine, and its view of the file system with it
		_ = onecard.Hide(nodes)
		started <- command.Start()
	}()
	return <-started
}

// raise starts the child that is to follow, and says when it listens.
func (w *watcher) raise(ctx context.Context) <-chan heir {
	ready := make(chan heir, 1)
	w.children = slices.DeleteFunc(w.children, (*watchChild).hasGone)
	if n := len(w.children) - 1; n >= maxStuck {
		ready <- heir{err: stuckError(n)}
		return ready
	}
	w.overlap = overlap{heard: map[eventKey]int{}}
	h := heir{epoch: driverLoad(w.options.Paths)}
	if h.child, h.err = w.start(); h.err != nil {
		ready <- h
		return ready
	}
	go func() { ready <- h.await(ctx) }()
	return ready
}

// await returns when the child listens.
func (h heir) await(ctx context.Context) heir {
	limit := time.NewTimer(heirLimit)
	defer limit.Stop()
	for {
		select {
		case s := <-h.child.signals:
			h.held = append(h.held, s)
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				return h
			}
		case <-h.child.ended:
			h.err = h.child.failure()
			return h
		case <-limit.C:
			if len(h.held) == 0 {
				h.err = fmt.Errorf("NVML has not started for %s", heirLimit)
			}
			return h
		case <-ctx.Done():
			h.err = ctx.Err()
			return h
		}
	}
}

// takeOver ends a child whose heir listens. What only one of them has heard is said. Of events alike that come in this moment the count may be off.
func (w *watcher) takeOver(child *watchChild, epoch string, h heir) {
	w.part(child, epoch)
	w.overlap.until = time.Now()
	w.hanging = nil
	for _, s := range h.held {
		w.pass(s, h.epoch)
	}
}

// overlap knows the events that a child has said while another listened too.
type overlap struct {
	heard map[eventKey]int
	until time.Time // when it ended, zero while it is at work
}

// again takes away from an event's count what was said before, and says whether nothing is left of it.
func (o *overlap) again(e *device.HealthEvent) bool {
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
