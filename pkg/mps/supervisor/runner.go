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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

const (
	// The supervisor restarts a daemon firstPause after its end. Each further pause is twice as long
	// as the one before, up to maxPause. After a daemon ran for stableAfter, the next pause is
	// firstPause again.
	firstPause  = 500 * time.Millisecond
	maxPause    = 30 * time.Second
	stableAfter = time.Minute
	// quitSeconds is how long a daemon waits, after the command quit, for its servers that still have
	// clients. quitWait is how long the supervisor waits for the daemon's end after it sent that
	// command.
	quitSeconds = 2
	quitWait    = 4 * time.Second
)

// errRemoved and errStopping are the reasons for which a runner ends: a request to stop the daemon,
// or the end of the supervisor.
var (
	errRemoved  = errors.New("the daemon was stopped")
	errStopping = errors.New("the MPS supervisor of this node is stopping; the next one restarts the daemon")
)

// runner keeps one daemon running, from the request to start the daemon until its removal. It
// starts the daemon again whenever the daemon ends.
type runner struct {
	spec     mps.Daemon
	end      context.CancelCauseFunc
	finished chan struct{} // closed when the runner has finished
	leftErr  error         // why processes of the daemon are left, valid after finished is closed
	retry    wake.Signal   // requests an immediate start
	waits    waits         // how long the daemon's processes may take to end
	// started is the control daemon that was started last. It finds the daemon's processes
	// even if another process removed run.json.
	started runRecord

	mu  sync.Mutex
	now progress
}

// progress is how far the runner is with its daemon.
type progress struct {
	mps.Status
	changed chan struct{} // closed at the next change
}

func (r *runner) progress() progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

func (r *runner) setState(state mps.State, change func(now *progress)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.State, r.now.Since = state, time.Now()
	change(&r.now)
	close(r.now.changed)
	r.now.changed = make(chan struct{})
}

// run starts the daemon of r, and restarts it after a pause whenever it ends, until ctx ends. Then
// it ends all processes of the daemon.
func (s *Supervisor) run(ctx context.Context, r *runner) {
	defer close(r.finished)
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("daemon", r.spec.ID))
	logger := klog.FromContext(ctx)
	logs, stopLogs := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLogs()
	var logging sync.WaitGroup
	follower := newFollower(s.options.Paths.Logs(r.spec.ID), func(file, line string) {
		logger.Info("MPS daemon logged", "file", file, "line", line)
	})
	logging.Go(func() { follower.follow(logs) })
	pause := firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := s.serveOnce(ctx, r)
		r.waits = normalWaits
		if stuck := new(stuckError); errors.As(err, &stuck) {
			r.waits = shortWaits
		}
		if ctx.Err() != nil {
			break
		}
		if time.Since(began) > stableAfter {
			pause = firstPause
		}
		logger.Error(err, "MPS daemon is down, restarting it after a pause", "pause", pause)
		r.setState(mps.Failed, func(now *progress) { now.Error, now.PID, now.Restarts = err.Error(), 0, now.Restarts+1 })
		select {
		case <-ctx.Done():
		case <-r.retry:
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
	r.leftErr = s.processesOfRunner(r).end(r.waits)
	stopLogs()
	logging.Wait()
	logger.Info("MPS daemon has ended", "reason", context.Cause(ctx))
}

// serveOnce starts the daemon and always returns an error. It does so if the daemon does not become
// ready, and when the daemon has ended. If ctx ends first, serveOnce sends the command quit.
func (s *Supervisor) serveOnce(ctx context.Context, r *runner) error {
	r.setState(mps.Starting, func(*progress) {})
	if err := s.directories.make(r.spec.ID); err != nil {
		return err
	}
	c, err := newControl(s.options, r.spec)
	if err != nil {
		return err
	}
	output, err := openOutput(s.options.Paths.Logs(r.spec.ID))
	if err != nil {
		return err
	}
	defer func() { _ = output.Close() }()
	written, err := output.Seek(0, 2)
	if err != nil {
		return fmt.Errorf("open the log of the control daemon: %w", err)
	}
	p, err := s.startProcess(r, c, output)
	if err != nil {
		return err
	}
	if err := s.makeReady(ctx, r.spec, c, p); err != nil {
		if ctx.Err() == nil { // The daemon may hang, so end it.
			return errors.Join(withLastLines(err, p, output, written, r.spec.MultiUser), s.processesOfRunner(r).end(normalWaits))
		}
		return err // run ends the daemon's processes.
	}
	klog.FromContext(ctx).Info("MPS daemon is ready", "pid", p.PID, "devices", r.spec.Devices)
	r.setState(mps.Ready, func(now *progress) { now.PID, now.Error = p.PID, "" })
	select {
	case <-p.done:
		return withLastLines(errEnded, p, output, written, false)
	case <-ctx.Done():
		quit(ctx, c, p)
		return context.Cause(ctx)
	}
}

// startProcess ends all processes that are left of the daemon, such as servers whose control daemon
// died. Then it starts a new control daemon.
func (s *Supervisor) startProcess(r *runner, c control, output *os.File) (*process, error) {
	id := r.spec.ID
	if err := s.processesOfRunner(r).end(r.waits); err != nil {
		return nil, err
	}
	if err := s.directories.removeClientFiles(id); err != nil {
		return nil, err
	}
	p, err := spawn(c.program, c.view, daemonArgs(r.spec), c.env, output)
	if err != nil {
		return nil, err
	}
	r.started = p.runRecord
	if err := s.directories.write(id, runFile, p.runRecord); err != nil {
		return nil, errors.Join(fmt.Errorf("record the process of the control daemon: %w", err), s.processesOfRunner(r).end(normalWaits))
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

// quit sends the command quit to a control daemon, and waits up to quitWait for its end. A daemon
// that still runs then gets signals from the runner.
func quit(ctx context.Context, c control, p *process) {
	quitCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitWait)
	defer cancel()
	if _, err := c.ask(quitCtx, fmt.Sprintf("quit -t %d", quitSeconds)); err != nil {
		klog.FromContext(ctx).Info("MPS daemon did not accept the command quit, sending SIGTERM", "reason", err)
		return
	}
	select {
	case <-p.done:
	case <-quitCtx.Done():
	}
}
