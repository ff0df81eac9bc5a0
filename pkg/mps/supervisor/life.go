package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

const (
	// A daemon that ends is started again at once, and then after pauses that double, until it has stayed for a while.
	firstPause = 500 * time.Millisecond
	maxPause   = 30 * time.Second
	stays      = time.Minute
	// quitSeconds is how long a daemon that was told to quit waits for servers with clients, and quitWait how long it is waited for.
	quitSeconds = 2
	quitWait    = 4 * time.Second
)

// errRemoved and errStopping are why lives end.
var (
	errRemoved  = errors.New("the daemon was stopped")
	errStopping = errors.New("the MPS supervisor of this node is stopping, its next one starts the daemon again")
)

// life is a daemon that should run, from its specification's coming to its going.
type life struct {
	spec  mps.Daemon
	end   context.CancelCauseFunc
	over  chan struct{} // closed when it has ended
	left  error         // why a process is left; read after over
	awake chan struct{} // a try to start it is wanted now
	waits waits         // how long its processes may take to end; brief once they are known to be stuck

	mu      sync.Mutex
	status  mps.Status
	tries   int           // how many starts have begun
	proven  bool          // it has been ready, in this supervisor's time or an earlier one's
	changed chan struct{} // closed at the next change
}

func newLife(spec mps.Daemon, proven bool) *life {
	return &life{
		spec: spec, over: make(chan struct{}), awake: make(chan struct{}, 1), waits: patient, proven: proven, changed: make(chan struct{}),
		status: mps.Status{Daemon: spec, State: mps.Starting, Since: time.Now()},
	}
}

// look gives the status and a channel that is closed when there is a newer one.
func (l *life) look() (status mps.Status, tries int, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status, l.tries, l.changed
}

func (l *life) become(state mps.State, change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.State, l.status.Since = state, time.Now()
	if change != nil {
		change()
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *life) wake() {
	select {
	case l.awake <- struct{}{}:
	default:
	}
}

// live keeps the daemon running until the context ends.
func (s *Supervisor) live(ctx context.Context, l *life) {
	defer close(l.over)
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("daemon", l.spec.ID))
	logger := klog.FromContext(ctx)
	logs, stopLogs := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLogs()
	var logging sync.WaitGroup
	follower := newFollower(s.visible.Logs(l.spec.ID), func(file, line string) {
		if routine.MatchString(line) {
			return
		}
		ok, kept := s.ration.allow(time.Now())
		if kept > 0 {
			logger.Info("MPS daemons have said more than is told here, it is in their files, or was", "lines", kept)
		}
		if ok {
			logger.Info("MPS daemon says", "file", file, "line", line)
		}
	})
	logging.Go(func() { follower.follow(logs) })
	pause := firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := s.serveOnce(ctx, l)
		l.waits = patient
		if stuck := new(stuckError); errors.As(err, &stuck) {
			l.waits = brief
		}
		if ctx.Err() != nil {
			break
		}
		if time.Since(began) > stays {
			pause = firstPause
		}
		logger.Error(err, "MPS daemon does not run, it will be started again", "after", pause)
		l.become(mps.Failed, func() { l.status.Error, l.status.PID = err.Error(), 0; l.status.Restarts++ })
		select {
		case <-ctx.Done():
		case <-l.awake:
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
	l.left = s.kin(l.spec.ID).end(l.waits)
	stopLogs()
	logging.Wait()
	logger.Info("MPS daemon has ended", "why", context.Cause(ctx))
}

// serveOnce starts the daemon, or takes over one that runs, and returns when it has ended. If the context ends, it is told to quit.
func (s *Supervisor) serveOnce(ctx context.Context, l *life) error {
	l.become(mps.Starting, func() { l.tries++ })
	if err := s.directories.make(l.spec.ID); err != nil {
		return err
	}
	c, err := newControl(s.options, l.spec)
	if err != nil {
		return err
	}
	output, err := openOutput(s.visible.Logs(l.spec.ID))
	if err != nil {
		return err
	}
	defer func() { _ = output.Close() }()
	written, err := output.Seek(0, 2)
	if err != nil {
		return fmt.Errorf("open the log of the control daemon: %w", err)
	}
	p, err := s.takeOverOrStart(ctx, l, c, output)
	if err != nil {
		return err
	}
	if err := s.makeReady(ctx, l.spec, c, p); err != nil {
		if ctx.Err() == nil { // what it is told, it may hang at
			return errors.Join(explain(err, p, output, written, l.spec.MultiUser), s.kin(l.spec.ID).end(patient))
		}
		return err // the life's end takes it away
	}
	klog.FromContext(ctx).Info("MPS daemon is ready", "pid", p.pid, "devices", l.spec.Devices)
	l.become(mps.Ready, func() { l.status.PID, l.status.Error, l.proven = p.pid, "", true })
	select {
	case <-p.done:
		return explain(errEnded, p, output, written, false)
	case <-ctx.Done():
		quit(ctx, c, p)
		return context.Cause(ctx)
	}
}

// takeOverOrStart leaves exactly one control daemon running.
func (s *Supervisor) takeOverOrStart(ctx context.Context, l *life, c control, output *os.File) (*process, error) {
	id := l.spec.ID
	var run runRecord
	if err := s.directories.read(id, runFile, &run); err == nil {
		if p := adopt(run, s.kin(id)); p != nil {
			klog.FromContext(ctx).Info("MPS daemon still runs, it is taken over", "pid", p.pid)
			return p, nil
		}
	}
	// Servers of a daemon that died, or a daemon whose number an earlier supervisor had no time to write down.
	if err := s.kin(id).end(l.waits); err != nil {
		return nil, err
	}
	if err := s.directories.empty(id); err != nil {
		return nil, err
	}
	// Where it will be is on the disk first, so that a supervisor in another container finds it.
	if err := s.directories.write(id, runFile, runRecord{Groups: s.groups}); err != nil {
		return nil, err
	}
	p, err := spawn(c.program, c.view, daemonArgs(l.spec), c.env, output)
	if err != nil {
		return nil, err
	}
	started, err := startTime(procRoot, p.pid)
	if err == nil {
		err = s.directories.write(id, runFile, runRecord{PID: p.pid, StartTime: started, Groups: s.groups})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("write down the process of the control daemon: %w", err), s.kin(id).end(patient))
	}
	return p, nil
}

func (s *Supervisor) makeReady(ctx context.Context, spec mps.Daemon, c control, p *process) error {
	limit := s.options.StartTimeout
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the control daemon is not ready after %s", limit))
	defer cancel()
	if err := c.awaitAnswer(ctx, p); err != nil {
		return err
	}
	return c.apply(ctx, spec)
}

// quit tells a daemon to end in order. What it does not do in time, signals do.
func quit(ctx context.Context, c control, p *process) {
	told, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitWait)
	defer cancel()
	if _, err := c.ask(told, fmt.Sprintf("quit -t %d", quitSeconds)); err != nil {
		klog.FromContext(ctx).Info("MPS daemon cannot be told to quit, it is terminated", "reason", err)
		return
	}
	select {
	case <-p.done:
	case <-told.Done():
	}
}
