package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// Supervisor is the parent of a node's MPS control daemons. Only one runs on a node at a time.
type Supervisor struct {
	options     Options
	directories directories
	bootID      string
	locks       *lock.Set // of lockDaemon
	// ctx ends when the supervisor stops. All runners end with it.
	ctx context.Context

	mu      sync.Mutex
	runners map[string]*runner
}

// Run supervises daemons until ctx ends. Then it stops all daemons cleanly and returns nil.
func Run(ctx context.Context, options Options) error {
	if err := options.complete(); err != nil {
		return err
	}
	boot, err := durable.BootID(procRoot)
	if err != nil {
		return err
	}
	s := &Supervisor{
		options: options, bootID: boot,
		directories: directories{paths: options.Paths, label: options.SELinuxLabel, sharedMemory: options.sharedMemory()},
		runners:     map[string]*runner{},
	}
	held, err := acquireSupervisorLock(ctx, s.options.Paths.Root(), s.directories.prepare)
	if err != nil {
		return err
	}
	defer held.Release()
	if s.locks, err = openLocks(s.options.Paths.Root()); err != nil {
		return err
	}
	running, stopRunners := context.WithCancelCause(context.WithoutCancel(ctx))
	s.ctx = running
	defer s.waitAll()
	defer stopRunners(errStopping)
	if err := s.restore(); err != nil {
		return err
	}
	return s.serve(ctx, func() { stopRunners(errStopping) })
}

// serve answers the plugin's requests until ctx ends. Then it calls stopRunners to stop all
// daemons, and answers the requests that are still waiting.
func (s *Supervisor) serve(ctx context.Context, stopRunners func()) error {
	listener, err := mps.Listen(s.options.Paths)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	klog.FromContext(ctx).Info("Supervising MPS daemons", "socket", s.options.Paths.Socket(), "driverRoot", s.options.DriverRoot)
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", s.options.Paths.Socket(), err)
	case <-ctx.Done():
	}
	// After this call, requests that wait for a daemon return errStopping.
	stopRunners()
	s.waitAll()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(closing); err != nil {
		_ = server.Close() // Close the connections whose requests are not finished after a second.
	}
	s.directories.removeIfUnused()
	return nil
}

// waitAll returns when every runner has ended its daemon.
func (s *Supervisor) waitAll() {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.runners))
	s.mu.Unlock()
	for _, r := range all {
		<-r.finished
	}
}

// restore starts the daemons whose files an earlier supervisor left on disk. If the spec.json of a
// daemon is missing, invalid or from an earlier boot, restore ends the daemon's processes and
// removes its files instead.
func (s *Supervisor) restore() error {
	ids, err := s.directories.daemonIDs()
	if err != nil {
		return err
	}
	for _, id := range ids {
		spec, err := s.directories.readSpec(s.bootID, id)
		if err == nil {
			s.startRunner(spec)
			continue
		}
		logger := klog.FromContext(s.ctx).WithValues("daemon", id)
		logger.Info("Removing an MPS daemon: its specification is missing, invalid or from an earlier boot", "reason", err)
		// A request for the same daemon waits until the removal is done. Requests for others do not wait.
		held, err := s.lockDaemon(s.ctx, id)
		if err != nil {
			return err
		}
		go func() {
			defer held.Release()
			if err := s.cleanUp(id); err != nil {
				logger.Error(err, "Failed to remove what is left of an MPS daemon")
			}
		}()
	}
	return nil
}

// startRunner creates the runner of a daemon and starts it. It also returns the runner's progress
// before the start. The caller must have locked the daemon, unless the supervisor does not yet
// serve requests.
func (s *Supervisor) startRunner(spec mps.Daemon) (*runner, progress) {
	ctx, end := context.WithCancelCause(s.ctx)
	first := progress{Status: mps.Status{Daemon: spec, State: mps.Starting, Since: time.Now()}, changed: make(chan struct{})}
	r := &runner{spec: spec, end: end, finished: make(chan struct{}), retry: wake.New(), waits: normalWaits, now: first}
	s.mu.Lock()
	s.runners[spec.ID] = r
	s.mu.Unlock()
	go s.run(ctx, r)
	return r, first
}

func (s *Supervisor) find(id string) *runner {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runners[id]
}

// Start returns nil when the daemon runs as the valid spec describes. [mps.Client.Start] says what
// it does with an existing daemon and after an error.
func (s *Supervisor) Start(ctx context.Context, spec mps.Daemon) error {
	held, err := s.lockDaemon(ctx, spec.ID)
	if err != nil {
		return err
	}
	defer held.Release()
	r := s.find(spec.ID)
	if r != nil && (r.isFinished() || !reflect.DeepEqual(r.spec, spec)) {
		if s.ctx.Err() != nil {
			return errStopping
		}
		klog.FromContext(s.ctx).Info("Replacing MPS daemon: its settings changed or it has ended", "daemon", spec.ID)
		if err := s.stopRunner(r); err != nil {
			return err
		}
		r = nil
	}
	if r != nil {
		now := r.progress()
		switch now.State {
		case mps.Ready:
			return s.verify(ctx, r)
		case mps.Failed:
			r.retry.Wake()
		}
		return r.awaitReady(ctx, now)
	}
	if s.ctx.Err() != nil {
		return errStopping
	}
	if err := s.directories.make(spec.ID); err != nil {
		return err
	}
	if err := s.directories.writeSpec(s.bootID, spec); err != nil {
		return err
	}
	r, now := s.startRunner(spec)
	return r.awaitReady(ctx, now)
}

// awaitReady returns nil when the daemon is ready, and the daemon's error when a start fails. It
// waits for one of the two to happen after the progress now.
func (r *runner) awaitReady(ctx context.Context, now progress) error {
	for {
		select {
		case <-now.changed:
		case <-r.finished:
			return errStopping
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		switch now = r.progress(); now.State {
		case mps.Ready:
			return nil
		case mps.Failed:
			return errors.New(now.Error)
		}
	}
}

// isFinished reports whether the runner has stopped for good. Such a runner is registered only if a
// process of its daemon survived SIGKILL.
func (r *runner) isFinished() bool {
	select {
	case <-r.finished:
		return true
	default:
		return false
	}
}

// verify returns an error if a ready daemon does not answer, has lost a directory that its clients
// mount, or does not take a default value that its spec asks for. It sets missing defaults.
func (s *Supervisor) verify(ctx context.Context, r *runner) error {
	if err := s.checkDirectories(r); err != nil {
		return err
	}
	c, err := newControl(s.options, r.spec)
	if err != nil {
		return err
	}
	if _, err := c.ask(ctx, "get_server_list"); errors.Is(err, context.Canceled) {
		// The daemon may be fine, because the caller canceled the request. So the error must not suggest
		// to kill the daemon.
		return fmt.Errorf("check whether the MPS daemon answers: %w", err)
	} else if err != nil {
		return fmt.Errorf("the MPS daemon runs but does not answer "+
			"(to restart it, which ends its clients, kill process %d): %w", r.progress().PID, err)
	}
	return c.apply(ctx, r.spec)
}

// checkDirectories returns an error if another program has removed a directory that the daemon
// shares with its clients. A new directory would not be the daemon's until the daemon restarts.
func (s *Supervisor) checkDirectories(r *runner) error {
	for _, dir := range []string{s.options.Paths.Pipes(r.spec.ID), s.options.Paths.Shm(r.spec.ID)} {
		is, err := mounted(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("check the directories of the MPS daemon: %w", err)
		}
		if !is {
			return fmt.Errorf("%s was removed under the MPS daemon, so no new container can become its client "+
				"(to restart it, which ends its clients, kill process %d)", dir, r.progress().PID)
		}
	}
	return nil
}

// Stop returns nil when no process and no directory of the daemon is left, also if there was none.
func (s *Supervisor) Stop(ctx context.Context, id string) error {
	held, err := s.lockDaemon(ctx, id)
	if err != nil {
		return err
	}
	defer held.Release()
	if r := s.find(id); r != nil {
		if err := s.stopRunner(r); err != nil {
			return err
		}
	}
	return s.cleanUp(id)
}

// stopRunner ends the runner's daemon and removes the runner from s.runners. If a process of the
// daemon survives SIGKILL, the runner stays there and stopRunner returns an error. It does not
// remove the daemon's files.
func (s *Supervisor) stopRunner(r *runner) error {
	r.end(errRemoved)
	<-r.finished
	if r.leftErr != nil {
		if err := s.processesOfRunner(r).end(shortWaits); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.runners, r.spec.ID)
	return nil
}

// processesOfRunner returns the set of processes of the runner's daemon. Before the first start it
// is that of a daemon of an earlier supervisor.
func (s *Supervisor) processesOfRunner(r *runner) processSet {
	if r.started.PID != 0 {
		return processSet{run: r.started, proc: procRoot}
	}
	return s.processesOf(r.spec.ID)
}

// processesOf returns the set of processes of a daemon, as run.json names them.
func (s *Supervisor) processesOf(id string) processSet {
	return s.directories.processesOf(id, procRoot)
}

// cleanUp ends the processes and removes the files of a daemon that has no runner.
func (s *Supervisor) cleanUp(id string) error {
	if err := s.processesOf(id).end(normalWaits); err != nil {
		return err
	}
	return s.directories.remove(id)
}

// List returns the status of all daemons, sorted by ID.
func (s *Supervisor) List() []mps.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []mps.Status{}
	for _, id := range slices.Sorted(maps.Keys(s.runners)) {
		all = append(all, s.runners[id].progress().Status)
	}
	return all
}
