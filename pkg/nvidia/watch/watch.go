package watch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/exclusion"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

const (
	// DefaultInterval is how often each GPU is polled. Events report most faults sooner.
	DefaultInterval = 5 * time.Second
	// After a child process ended, the watcher waits firstRestart, then with growing pauses up to
	// lastRestart, before it starts a new one. After a child that lived for longLife it waits
	// firstRestart again.
	firstRestart = time.Second
	lastRestart  = 30 * time.Second
	longLife     = time.Minute
	// silenceGrace is how late a signal of a child process may be before the child counts as hung
	// and is replaced.
	silenceGrace = 10 * time.Second
	// maxApart is how many GPUs at most get their own child process. Each of these processes may
	// end up hung in the driver, and Run stops starting children when MaxStuck hang.
	maxApart = child.MaxStuck - 1
	// drainLimit is how long a child process that is no longer needed may take to send its last
	// events.
	drainLimit = 500 * time.Millisecond
	// releaseLimit is how long Run waits until its child processes have closed NVML.
	releaseLimit = 5 * time.Second
)

// Options configure [Run].
type Options struct {
	Paths nvidia.Paths
	// Command starts the child process, which must call [Serve] on its standard input and output.
	Command []string
	// Interval is how often each GPU is polled, [DefaultInterval] if it is 0.
	Interval time.Duration
	// Partitions change the same GPUs. Nil means that nothing changes the GPUs.
	Partitions Changer
}

// Changer changes GPUs while they are watched.
type Changer interface {
	// Look reads how a card is partitioned now. The watch asks it for the placements of MIG
	// instances with events.
	Look(ctx context.Context, card device.Card) (device.CardState, error)
	// Exclusions are the GPUs that no watcher process may have open, because their MIG mode
	// changes.
	Exclusions() *exclusion.Set
}

// Run watches all GPUs until ctx ends, and calls emit with one signal at a time. It does not
// change the GPUs. NVML runs in a child process. Run replaces a child that dies, falls silent or
// does not know a new GPU. Without a driver it starts no child.
//
// A hung GPU blocks two threads of the child. It does not block other GPUs, unless its NVML call
// holds a lock of NVML. So when two GPUs hang at once, the first one gets its own child. If the
// second one was only blocked, it then answers again. At most maxApart GPUs get their own child.
//
// While [Options.Partitions] change a GPU's MIG mode, no process of Run has that GPU open, and Run
// emits nothing about it. A new process for the other GPUs takes over first, so that no event of
// them is lost.
//
// When Run returns, its children have ended and closed NVML. It returns an error if a child hangs
// in the driver and cannot be killed.
func Run(ctx context.Context, o Options, emit func(device.Signal)) error {
	return newWatcher(o, emit).run(ctx)
}

// watcher is the part of [Run] that runs in the plugin's process. It starts the child processes
// and emits their signals.
type watcher struct {
	options  Options
	emitting sync.Mutex
	emit     func(device.Signal)
	// wedged is how long a GPU may take for one query before it counts as hung.
	wedged time.Duration
	// uuids has the UUIDs of cards that have answered. A lost card cannot report its own UUID.
	uuids map[device.PCIAddress]string
	// children are the child processes that have not ended: the current one, a replacement that
	// starts, and those that were killed and hang in the driver.
	children []*watchChild
	excluded *exclusion.Set
	places   *placeResolver
	overlap  overlap
	answered lastAnswers

	// only is the card of a watcher for a single card. It is empty for the watcher of all other
	// cards.
	only  device.PCIAddress
	apart []device.PCIAddress
	// hanging are the cards that do not answer, in the order in which they were reported.
	hanging       []device.PCIAddress
	apartWatchers sync.WaitGroup // watchers of single cards
	apartErrors   []*error       // one error for each of apartWatchers
}

// errApart says that two cards hang at once, so that the first one gets its own child process.
var errApart = errors.New("two GPUs hang at once: a separate process now watches the first one")

func newWatcher(o Options, emit func(device.Signal)) *watcher {
	if o.Interval <= 0 {
		o.Interval = DefaultInterval
	}
	o.Paths = o.Paths.WithDefaults()
	w := &watcher{options: o, wedged: nvmlx.CallLimit, uuids: map[device.PCIAddress]string{}, answered: lastAnswers{}}
	w.emit = func(s device.Signal) {
		w.emitting.Lock()
		defer w.emitting.Unlock()
		emit(s)
	}
	w.excluded, w.places = exclusion.NewSet(), newPlaceResolver(w.emit)
	if o.Partitions != nil {
		w.coordinateWith(o.Partitions)
	}
	return w
}

// coordinateWith lets p exclude cards from the watch while it changes their MIG mode, and lets the
// watcher ask p for the placements of MIG instances.
func (w *watcher) coordinateWith(p Changer) { w.excluded, w.places.look = p.Exclusions(), p.Look }

func (w *watcher) run(ctx context.Context) error {
	if w.only == "" {
		w.excluded.SetRunning(true)
		defer w.excluded.SetRunning(false)
	}
	for pause := firstRestart; ctx.Err() == nil; pause = min(max(2*pause, firstRestart), lastRestart) {
		began, changed := time.Now(), w.excluded.Changes()
		err := w.watch(ctx)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errExcluded) {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			pause = 0
			continue
		}
		w.report(device.WatcherState{Error: err.Error()})
		if errors.Is(err, errApart) {
			w.watchApart(ctx, w.hanging[0])
		}
		if errors.Is(err, errApart) || errors.Is(err, errNotReplaced) {
			pause = 0 // the next pause is firstRestart
			continue
		}
		var unready *nvidia.NotReadyError
		if errors.As(err, &unready) || time.Since(began) > longLife {
			pause = firstRestart
		}
		nvmlx.Sleep(ctx, pause)
	}
	return w.release()
}

// watchApart starts a watcher for a single card. It does not emit that watcher's WatcherState
// signals, because they would say nothing about the other cards.
func (w *watcher) watchApart(ctx context.Context, a device.PCIAddress) {
	alone := newWatcher(w.options, func(s device.Signal) {
		if s.Watcher == nil {
			w.emit(s)
		}
	})
	alone.only, alone.wedged, alone.uuids[a] = a, w.wedged, w.uuids[a]
	w.apart = append(w.apart, a)
	failed := new(error)
	w.apartErrors = append(w.apartErrors, failed)
	w.apartWatchers.Go(func() { *failed = alone.run(ctx) })
}

func (w *watcher) report(s device.WatcherState) {
	s.At = time.Now()
	w.emit(device.Signal{Watcher: &s})
}

// release returns when no child process has NVML open, or after releaseLimit. Its error wraps a
// [nvidia.HangingError] for each child process that hangs.
func (w *watcher) release() error {
	w.apartWatchers.Wait() // each releases as below
	w.places.finish()
	limit, cancel := context.WithTimeout(context.Background(), releaseLimit)
	defer cancel()
	var failed []error
	for _, c := range w.children {
		select {
		case <-c.Gone:
		case <-limit.Done():
			failed = append(failed, c.Hanging(errors.New("cannot end the watcher process")))
		}
	}
	for _, err := range w.apartErrors {
		failed = append(failed, *err)
	}
	if err := errors.Join(failed...); err != nil {
		w.report(device.WatcherState{Error: err.Error()})
		return err
	}
	w.report(device.WatcherState{Released: true, Error: "the watcher has released the hardware"})
	return nil
}

// watch runs one child process until it fails or ctx ends. It always returns an error.
func (w *watcher) watch(ctx context.Context) error {
	if err := host.Check(w.options.Paths); err != nil {
		return err // no need to start a process
	}
	w.forgetEnded()
	if n := w.countHung(); n >= child.MaxStuck {
		return stuckError(n)
	}
	w.hanging, w.overlap = nil, overlap{}
	child, err := w.start()
	if err != nil {
		return err
	}
	if w.only == "" {
		w.excluded.Replaced(nil)
	}
	return w.supervise(ctx, child)
}

// countHung counts the child processes that were killed but have not ended, except those that were
// replaced. Those have their own limit, because they must not keep the watch
// from starting again.
func (w *watcher) countHung() (n int) {
	for _, c := range w.children {
		if !c.replaced {
			n++
		}
	}
	return n
}

// errStuck says that no new child process was started, because too many hang in the driver.
var errStuck = errors.New("still hang in the NVIDIA driver")

func stuckError(n int) error {
	return fmt.Errorf("%d earlier watcher processes %w: check dmesg, and reset the GPUs or reboot the node", n, errStuck)
}
