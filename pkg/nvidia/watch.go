package nvidia

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// DefaultWatchInterval is how often each GPU is asked how it is. Events say most things sooner.
	DefaultWatchInterval = 5 * time.Second
	// A child that ended is followed by another first after firstRestart, then ever later, at most lastRestart; one that lived for long begins anew.
	firstRestart = time.Second
	lastRestart  = 30 * time.Second
	longLife     = time.Minute
	// silenceGrace is how much longer than it should a child may say nothing.
	silenceGrace = 10 * time.Second
	// maxApart is how many GPUs are watched by a child of their own at most. Each may leave one behind that hangs, and of those there may be maxStuck.
	maxApart = maxStuck - 1
	// lastWordsLimit is how long a child that is not needed any more may take to say what it has heard.
	lastWordsLimit = 500 * time.Millisecond
	// releaseLimit is how long Watch waits for its child to let go of the hardware.
	releaseLimit = 5 * time.Second
)

// WatchOptions say what is watched and by whom.
type WatchOptions struct {
	Paths Paths
	// Command starts the child, which must call [ServeWatch] on its standard input and output.
	Command []string
	// Interval is how often each GPU is asked; [DefaultWatchInterval] if it is 0.
	Interval time.Duration
	// Partitions cut the same GPUs. They locate the instances of events, and exclude a GPU from the
	// watch while they change its MIG mode. Nil means that nothing cuts GPUs.
	Partitions *Partitions
}

// Watch listens to all GPUs until ctx ends, and calls emit with each signal, one at a time. It changes nothing. NVML lives in a child process; one that
// dies, falls silent, or asks for it is followed by another. While there is no driver no child is started.
//
// A GPU that hangs costs the child two threads and holds up no other, unless it has a lock of NVML's while it hangs: when two hang at once, the one that
// began is watched by a child of its own from then on, so that the other, if it is only held up, answers again. There are at most maxApart such children.
//
// While [Partitions] change a GPU's MIG mode, no process of Watch has that GPU open and Watch says
// nothing about it. A process for the other GPUs takes over first, so that their events arrive.
//
// When Watch returns the children have ended, and with them every handle and event set; if one cannot be ended because it hangs in the driver, that is the
// error.
func Watch(ctx context.Context, o WatchOptions, emit func(device.Signal)) error {
	return newWatcher(o, emit).run(ctx)
}

// watcher is the parent's side.
type watcher struct {
	options  WatchOptions
	emitting sync.Mutex
	emit     func(device.Signal)
	// wedged is how long a GPU may take for one question.
	wedged time.Duration
	// uuids are those of cards that have answered: one that is lost cannot say its own.
	uuids map[device.PCIAddress]string
	// children are those that have not ended, the last one last. Those before it hang in the driver.
	children []*watchChild
	excluded *exclusions
	places   *placeResolver
	placing  context.Context // bounds the look-ups of places
	overlap  overlap

	// only is the card that this watcher is for, empty for all but those apart.
	only  device.PCIAddress
	apart []device.PCIAddress
	// hanging are the cards that do not answer, in the order in which they were said to.
	hanging []device.PCIAddress
	aside   sync.WaitGroup // the watchers of the cards apart
	failed  []*error       // of theirs, each written by its own
}

// errApart says that a card hangs and another with it.
var errApart = errors.New("two GPUs hang at once: the one that began is watched by a process of its own from now on")

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
		w.serve(o.Partitions)
	}
	return w
}

// serve makes the watcher exclude the cards that p needs, and look up places with p.
func (w *watcher) serve(p *Partitions) { w.excluded, w.places.look = p.excluded, p.Look }

func (w *watcher) run(ctx context.Context) error {
	placing, placed := outlasting(ctx)
	defer placed()
	w.placing = placing
	if w.only == "" {
		w.excluded.run(true)
		defer w.excluded.run(false)
	}
	for pause := firstRestart; ctx.Err() == nil; pause = min(max(2*pause, firstRestart), lastRestart) {
		began, changed := time.Now(), w.excluded.changed()
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
		w.say(device.WatcherState{Error: err.Error()})
		if errors.Is(err, errApart) {
			w.setApart(ctx, w.hanging[0])
			pause = 0 // and the next is firstRestart again
			continue
		}
		if errors.Is(err, errNotReplaced) {
			pause = 0 // the same
			continue
		}
		var unready *NotReadyError
		if errors.As(err, &unready) || time.Since(began) > longLife {
			pause = firstRestart
		}
		rest(ctx, pause)
	}
	return w.release()
}

// setApart has a card watched by a child of its own. What that child says of how well it listens is about one card, and is not handed on.
func (w *watcher) setApart(ctx context.Context, a device.PCIAddress) {
	alone := newWatcher(w.options, func(s device.Signal) {
		if s.Watcher == nil {
			w.emit(s)
		}
	})
	alone.only, alone.wedged, alone.uuids[a] = a, w.wedged, w.uuids[a]
	w.apart = append(w.apart, a)
	failed := new(error)
	w.failed = append(w.failed, failed)
	w.aside.Go(func() { *failed = alone.run(ctx) })
}

func (w *watcher) say(s device.WatcherState) {
	s.At = time.Now()
	w.emit(device.Signal{Watcher: &s})
}

// release ends when no child has NVML any more. Its error tells of each that hangs as a [*HangingError].
func (w *watcher) release() error {
	w.aside.Wait() // each of them keeps to the limit
	w.places.asking.Wait()
	limit, cancel := context.WithTimeout(context.Background(), releaseLimit)
	defer cancel()
	var failed []error
	for _, c := range w.children {
		select {
		case <-c.gone:
		case <-limit.Done():
			failed = append(failed, &HangingError{PID: c.process.Pid, Gone: c.gone, err: errors.New("who watches the GPUs cannot be ended")})
		}
	}
	for _, err := range w.failed {
		failed = append(failed, *err)
	}
	if err := errors.Join(failed...); err != nil {
		w.say(device.WatcherState{Error: err.Error()})
		return err
	}
	w.say(device.WatcherState{Released: true, Error: "the hardware was let go of"})
	return nil
}

// watch runs one child until it ends or ctx does. There is always an error.
func (w *watcher) watch(ctx context.Context) error {
	if err := Check(w.options.Paths); err != nil {
		return err // no need to start a process for that
	}
	w.bury()
	if n := w.hung(); n >= maxStuck {
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
	return w.attend(ctx, child)
}

// hung counts the processes that hang. Those that were replaced have a limit of their own: a change
// of MIG mode must not keep the watch from being started again.
func (w *watcher) hung() (n int) {
	for _, c := range w.children {
		if !c.replaced {
			n++
		}
	}
	return n
}

// errStuck says that one more process might hang too.
var errStuck = errors.New("still hang in the NVIDIA driver")

func stuckError(n int) error {
	return fmt.Errorf("%d earlier processes that watched the GPUs %w: look at dmesg, and reset the GPUs or reboot the node", n, errStuck)
}

// attend passes on what the watcher process says, and replaces the process when exclusions change.
func (w *watcher) attend(ctx context.Context, child *watchChild) error {
	epoch := driverLoad(w.options.Paths)
	silence := time.NewTimer(initLimit + w.options.Interval)
	defer silence.Stop()
	var next starting
	var retry <-chan time.Time // when to start one, nil while no time is set
	failed := false            // the last one could not take over
	replace := func() {
		w.setHangingApart(ctx)
		next = w.startReplacement(ctx)
	}
	defer func() { next.abandon() }()
	for {
		changed := w.excluded.changed()
		if next.coverage != nil {
			if now, _ := w.excluded.outdated(next.coverage); now {
				next.abandon()
				next = starting{}
			}
		}
		if now, soon := w.excluded.outdated(child.coverage); next.ready == nil && (now || soon) {
			switch {
			case now && !w.excluded.leaves(w.cards()):
				w.part(child, epoch)
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
				// A gap in the watch is better than a refusal of every mode change.
				if now, _ := w.excluded.outdated(child.coverage); now && !errors.Is(r.err, errStuck) {
					w.part(child, epoch)
					return fmt.Errorf("%w: %w", errNotReplaced, r.err)
				}
				continue
			}
			w.handOver(child, epoch, r)
			child, epoch = r.child, r.epoch
			w.excluded.hear(child.coverage)
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case s := <-child.signals:
			if s.Watcher != nil && driverLoad(w.options.Paths) != epoch {
				w.part(child, epoch) // what it has open is of a driver that is not there any more
				return errors.New("the NVIDIA driver was unloaded, or loaded again")
			}
			if s.Watcher != nil && s.Watcher.Up && s.Watcher.Events {
				w.excluded.hear(child.coverage)
			}
			w.pass(s, epoch) // which may take its time
			if len(w.hanging) > 1 && len(w.apart) < maxApart {
				w.part(child, epoch)
				return errApart
			}
			silence.Reset(2*w.options.Interval + w.wedged + silenceGrace)
		case <-child.ended:
			child.end()
			select { // its last words come with its end
			case <-child.gone:
			case <-time.After(time.Second):
			}
			return child.failure()
		case <-silence.C:
			child.end()
			return errors.New("the process that watches the GPUs has said nothing for long")
		case <-ctx.Done():
			w.part(child, epoch)
			return ctx.Err()
		}
	}
}

// part ends a child after it has said what it has heard: nobody else can say that again. How cards are is asked anew.
func (w *watcher) part(child *watchChild, epoch string) {
	_ = child.stdin.Close()
	limit := time.NewTimer(lastWordsLimit)
	defer limit.Stop()
	for {
		select {
		case s := <-child.signals:
			if s.Event != nil {
				w.pass(s, epoch)
			}
			continue
		case <-child.ended:
		case <-limit.C:
		}
		child.end()
		return
	}
}

// bury forgets the children that have ended.
func (w *watcher) bury() {
	var left []*watchChild
	for _, c := range w.children {
		select {
		case <-c.gone:
		case <-time.After(time.Second): // it was killed
			left = append(left, c)
		}
	}
	w.children = left
}

// pass hands a signal on, with what the child cannot know.
func (w *watcher) pass(s device.Signal, epoch string) {
	if c := s.Condition; c != nil {
		w.hanging = slices.DeleteFunc(w.hanging, func(a device.PCIAddress) bool { return a == c.Card.PCIAddress && c.Reach != device.ReachWedged })
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

// oneProcessor keeps the Go runtime of a child from waking a thread for each of the little things that it does at the same time. Calls that NVML takes long
// for have threads of their own all the same.
const oneProcessor = "GOMAXPROCS=1"

// watchChild is a process that has NVML.
type watchChild struct {
	process   *os.Process
	stdin     io.WriteCloser
	signals   chan device.Signal
	stop      chan struct{} // closed when nobody takes signals any more
	ended     chan struct{} // closed when it has said its last
	gone      chan struct{} // closed when the process has ended
	err       error         // of what it said, to be read after ended
	lastWords *tail
	coverage  *coverage
	replaced  bool // another has taken over from it, or it could not take over itself
}

func (c *watchChild) hasEnded() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}

func startWatchChild(command []string, order watchOrder, hidden []string) (*watchChild, error) {
	child := exec.Command(command[0], command[1:]...)
	child.Env = append(os.Environ(), oneProcessor)
	stdin, err := child.StdinPipe() // its end tells the child that we are gone
	if err != nil {
		return nil, err
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c := &watchChild{
		stdin: stdin, signals: make(chan device.Signal), stop: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
		lastWords: &tail{limit: 2048},
	}
	child.Stderr = c.lastWords
	child.WaitDelay = time.Second
	if err := startHiding(child, hidden); err != nil {
		return nil, err
	}
	c.process = child.Process
	go func() {
		defer close(c.gone)
		c.err = json.NewEncoder(stdin).Encode(order)
		if c.err == nil {
			c.err = c.listen(stdout)
		}
		close(c.ended)
		_ = child.Process.Kill() // one that says no more is of no use
		_ = child.Wait()
	}()
	return c, nil
}

// listen takes signals until there are no more.
func (c *watchChild) listen(stdout io.Reader) error {
	decoder := json.NewDecoder(stdout)
	for {
		var s device.Signal
		if err := decoder.Decode(&s); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a signal: %w", err)
		}
		select {
		case c.signals <- s:
		case <-c.stop:
			return nil
		}
	}
}

// end kills the child: it has nothing to save. It has gone when the driver lets it go.
func (c *watchChild) end() {
	close(c.stop)
	_ = c.stdin.Close()
	_ = c.process.Kill()
}

// failure is why the child ended by itself.
func (c *watchChild) failure() error {
	if c.err != nil {
		return fmt.Errorf("the process that watches the GPUs has ended (%w)%s", c.err, c.lastWords)
	}
	return fmt.Errorf("the process that watches the GPUs has ended%s", c.lastWords)
}

// driverLoad is equal as long as the same load of the kernel driver runs: it is by the numbers and times of birth that the kernel gives to what the
// driver shows of itself, as far as there are any. It is empty if no driver is loaded.
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
