package nvidia

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// DefaultWatchInterval is how often each GPU is polled. Events report most faults sooner.
	DefaultWatchInterval = 5 * time.Second
	// After a child process ended, the watcher waits firstRestart, then with growing pauses up to
	// lastRestart, before it starts a new one. After a child that lived for longLife it waits
	// firstRestart again.
	firstRestart = time.Second
	lastRestart  = 30 * time.Second
	longLife     = time.Minute
	// silenceGrace is how late a signal of a child process may be before the child counts as hung and
	// is replaced.
	silenceGrace = 10 * time.Second
	// maxApart is how many GPUs at most get their own child process. Each of these processes may end
	// up hung in the driver, and Watch stops starting children when maxStuck hang.
	maxApart = maxStuck - 1
	// drainLimit is how long a child process that is no longer needed may take to send its last
	// events.
	drainLimit = 500 * time.Millisecond
	// releaseLimit is how long Watch waits until its child processes have closed NVML.
	releaseLimit = 5 * time.Second
)

// WatchOptions configure [Watch].
type WatchOptions struct {
	Paths Paths
	// Command starts the child process, which must call [ServeWatch] on its standard input and output.
	Command []string
	// Interval is how often each GPU is polled, [DefaultWatchInterval] if it is 0.
	Interval time.Duration
	// Partitions change the same GPUs. Watch uses them to find the placements of MIG instances with
	// events. They exclude a GPU from the watch while they change its MIG mode. Nil means that nothing
	// changes the GPUs.
	Partitions *Partitions
}

// Watch watches all GPUs until ctx ends, and calls emit with one signal at a time. It does not
// change the GPUs. NVML runs in a child process. Watch replaces a child that dies, falls silent, or
// needs to restart NVML. Without a driver it starts no child.
//
// A hung GPU blocks two threads of the child. It does not block other GPUs, unless its NVML call
// holds a lock of NVML. So when two GPUs hang at once, the first one gets its own child. If the
// second one was only blocked, it then answers again. At most maxApart GPUs get their own child.
//
// While [Partitions] change a GPU's MIG mode, no process of Watch has that GPU open, and Watch
// emits nothing about it. A new process for the other GPUs takes over first, so that no event of
// them is lost.
//
// When Watch returns, its children have ended and closed NVML. It returns an error if a child hangs
// in the driver and cannot be killed.
func Watch(ctx context.Context, o WatchOptions, emit func(device.Signal)) error {
	return newWatcher(o, emit).run(ctx)
}

// watcher is the part of [Watch] that runs in the plugin's process. It starts the child processes
// and emits their signals.
type watcher struct {
	options  WatchOptions
	emitting sync.Mutex
	emit     func(device.Signal)
	// wedged is how long a GPU may take for one query before it counts as hung.
	wedged time.Duration
	// uuids has the UUIDs of cards that have answered. A lost card cannot report its own UUID.
	uuids map[device.PCIAddress]string
	// children are the child processes that have not ended. The last one is the current one. The
	// others were killed and hang in the driver.
	children []*watchChild
	excluded *exclusions
	places   *placeResolver
	placing  context.Context // bounds the queries for placements of MIG instances
	overlap  overlap

	// only is the card of a watcher for a single card. It is empty for the watcher of all other cards.
	only  device.PCIAddress
	apart []device.PCIAddress
	// hanging are the cards that do not answer, in the order in which they were reported.
	hanging       []device.PCIAddress
	apartWatchers sync.WaitGroup // watchers of single cards
	apartErrors   []*error       // one error for each of apartWatchers
}

// errApart says that two cards hang at once, so that the first one gets its own child process.
var errApart = errors.New("two GPUs hang at once: a separate process now watches the first one")

func newWatcher(o WatchOptions, emit func(device.Signal)) *watcher {
	if o.Interval <= 0 {
		o.Interval = DefaultWatchInterval
	}
	w := &watcher{options: o, wedged: callLimit, uuids: map[device.PCIAddress]string{}}
	w.emit = func(s device.Signal) {
		w.emitting.Lock()
		defer w.emitting.Unlock()
		emit(s)
	}
	w.excluded, w.places = newExclusions(), &placeResolver{emit: w.emit}
	if o.Partitions != nil {
		w.coordinateWith(o.Partitions)
	}
	return w
}

// coordinateWith lets p exclude cards from the watch while it changes their MIG mode, and lets the
// watcher ask p for the placements of MIG instances.
func (w *watcher) coordinateWith(p *Partitions) { w.excluded, w.places.look = p.excluded, p.Look }

func (w *watcher) run(ctx context.Context) error {
	placing, placed := extendContext(ctx)
	defer placed()
	w.placing = placing
	if w.only == "" {
		w.excluded.run(true)
		defer w.excluded.run(false)
	}
	for pause := firstRestart; ctx.Err() == nil; pause = min(max(2*pause, firstRestart), lastRestart) {
		began, changed := time.Now(), w.excluded.changes()
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
			pause = 0 // the next pause is firstRestart
			continue
		}
		if errors.Is(err, errNotReplaced) {
			pause = 0 // the next pause is firstRestart
			continue
		}
		var unready *NotReadyError
		if errors.As(err, &unready) || time.Since(began) > longLife {
			pause = firstRestart
		}
		sleep(ctx, pause)
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
// [*HangingError] for each child process that hangs.
func (w *watcher) release() error {
	w.apartWatchers.Wait() // each waits for at most releaseLimit
	w.places.asking.Wait()
	limit, cancel := context.WithTimeout(context.Background(), releaseLimit)
	defer cancel()
	var failed []error
	for _, c := range w.children {
		select {
		case <-c.gone:
		case <-limit.Done():
			err := errors.New("cannot end the watcher process")
			failed = append(failed, &HangingError{PID: c.process.Pid, Gone: c.gone, err: err})
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
	if err := Check(w.options.Paths); err != nil {
		return err // no need to start a process
	}
	w.forgetEnded()
	if n := w.countHung(); n >= maxStuck {
		return stuckError(n)
	}
	w.hanging, w.overlap = nil, overlap{}
	child, err := w.start()
	if err != nil {
		return err
	}
	if w.only == "" {
		w.excluded.replaced(nil)
	}
	return w.supervise(ctx, child)
}

// countHung counts the child processes that were killed but have not ended, except those that were
// replaced for a MIG mode change. Those have their own limit, because they must not keep the watch
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

// supervise emits the signals of child until it fails, and replaces child when the set of cards
// excluded from the watch changes.
func (w *watcher) supervise(ctx context.Context, child *watchChild) error {
	epoch := driverLoad(w.options.Paths)
	silence := time.NewTimer(initLimit + w.options.Interval)
	defer silence.Stop()
	var next starting
	var retry <-chan time.Time // when to start a replacement, nil while unset
	failed := false            // the last replacement could not take over
	replace := func() {
		w.watchHangingApart(ctx)
		next = w.startReplacement(ctx)
	}
	defer func() { next.abandon() }()
	for {
		changed := w.excluded.changes()
		if next.coverage != nil {
			if now, _ := w.excluded.outdated(next.coverage); now {
				next.abandon()
				next = starting{}
			}
		}
		if now, soon := w.excluded.outdated(child.coverage); next.ready == nil && (now || soon) {
			switch {
			case now && !w.excluded.leavesAny(w.cards()):
				w.drainAndKill(child, epoch)
				return errExcluded
			case now && !failed:
				replace()
			case retry == nil:
				retry = time.After(restorePause)
			}
		}
		select {
		case <-changed:
		case <-retry:
			retry, failed = nil, false
			if now, soon := w.excluded.outdated(child.coverage); next.ready == nil && (now || soon) {
				replace()
			}
		case r := <-next.ready:
			next.cancel()
			next, retry, failed = starting{}, nil, r.err != nil
			w.excluded.replaced(r.err)
			if failed {
				r.abandon()
				// If no replacement works, end the old process anyway so that it closes the card: a gap in the
				// watch is better than refusing every MIG mode change.
				if now, _ := w.excluded.outdated(child.coverage); now && !errors.Is(r.err, errStuck) {
					w.drainAndKill(child, epoch)
					return fmt.Errorf("%w: %w", errNotReplaced, r.err)
				}
				continue
			}
			w.handOver(child, epoch, r)
			child, epoch = r.child, r.epoch
			w.excluded.listening(child.coverage)
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case s := <-child.signals:
			if s.Watcher != nil && driverLoad(w.options.Paths) != epoch {
				w.drainAndKill(child, epoch) // the child has the old driver's files open
				return errors.New("the NVIDIA driver was unloaded or reloaded")
			}
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				w.excluded.listening(child.coverage)
			}
			w.forward(s, epoch) // forward may block, so reset the timer after it
			if len(w.hanging) > 1 && len(w.apart) < maxApart {
				w.drainAndKill(child, epoch)
				return errApart
			}
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case <-child.ended:
			child.kill()
			select { // the child may have written an error before its end
			case <-child.gone:
			case <-time.After(time.Second):
			}
			return child.failure()
		case <-silence.C:
			child.kill()
			return errors.New("the watcher process has sent nothing for too long")
		case <-ctx.Done():
			w.drainAndKill(child, epoch)
			return ctx.Err()
		}
	}
}

// drainAndKill emits the events that the child process still has queued, because no other process
// has them, and then kills it. It drops the child's conditions, because the next child polls them
// again.
func (w *watcher) drainAndKill(child *watchChild, epoch string) {
	_ = child.stdin.Close()
	limit := time.NewTimer(drainLimit)
	defer limit.Stop()
	for {
		select {
		case s := <-child.signals:
			if s.Event != nil {
				w.forward(s, epoch)
			}
			continue
		case <-child.ended:
		case <-limit.C:
		}
		child.kill()
		return
	}
}

// forgetEnded removes the child processes that have ended from w.children.
func (w *watcher) forgetEnded() {
	var left []*watchChild
	for _, c := range w.children {
		select {
		case <-c.gone:
		case <-time.After(time.Second): // the process was killed, but has not ended
			left = append(left, c)
		}
	}
	w.children = left
}

// forward emits a signal of a child process, except for an event that an earlier child already
// reported. It adds what the child does not know, such as a lost card's UUID.
func (w *watcher) forward(s device.Signal, epoch string) {
	if c := s.Condition; c != nil {
		w.hanging = slices.DeleteFunc(w.hanging, func(a device.PCIAddress) bool {
			return a == c.Card.PCIAddress && c.Reach != device.ReachWedged
		})
		if c.Reach == device.ReachWedged && !slices.Contains(w.hanging, c.Card.PCIAddress) {
			w.hanging = append(w.hanging, c.Card.PCIAddress)
		}
	}
	switch {
	case s.Event != nil:
		if !w.overlap.repeated(s.Event) {
			w.places.add(w.placing, *s.Event)
		}
		return
	case s.Watcher != nil:
		s.Watcher.Driver = epoch
	case s.Condition != nil && s.Condition.Card.UUID == "":
		s.Condition.Card.UUID = w.uuids[s.Condition.Card.PCIAddress]
	case s.Condition != nil:
		w.uuids[s.Condition.Card.PCIAddress] = s.Condition.Card.UUID
	}
	w.emit(s)
}

// driverLoad returns a value that changes each time the driver's kernel module is loaded. It
// consists of inodes and birth times of the driver's directories in /proc and sysfs. It is empty if
// no driver is loaded.
func driverLoad(p Paths) string {
	p = p.withDefaults()
	var found string
	for _, path := range []string{filepath.Join(p.Sysfs, "module", "nvidia"), filepath.Join(p.Proc, "driver", "nvidia")} {
		var s unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &s); err == nil {
			found += fmt.Sprintf("%d.%d.%d ", s.Ino, s.Btime.Sec, s.Btime.Nsec)
		}
	}
	if found == "" {
		return ""
	}
	return found + readTrimmed(filepath.Join(p.Proc, "driver", "nvidia", "version"))
}
