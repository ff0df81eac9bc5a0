package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
)

// Supervisor is the parent of a node's MPS control daemons. There is one a node at a time.
type Supervisor struct {
	options     Options
	visible     mps.Paths
	directories directories
	bootID      string
	groups      string // this process's control groups
	turns       turns
	ration      ration
	// ctx ends when the supervisor stops, and with it the lives.
	ctx context.Context

	mu    sync.Mutex
	lives map[string]*life
}

// Run supervises until the context ends, and then ends all daemons in order.
func Run(ctx context.Context, options Options) error {
	if err := options.complete(); err != nil {
		return err
	}
	boot, err := durable.BootID(procRoot)
	if err != nil {
		return err
	}
	groups, err := groupsOf(procRoot, os.Getpid())
	if err != nil {
		return err
	}
	s := &Supervisor{
		options: options, visible: options.visible(), bootID: boot, groups: groups,
		directories: directories{paths: options.visible(), label: options.SELinuxLabel, sharedMemory: options.sharedMemory(), shm: new(sync.Mutex)},
		lives:       map[string]*life{},
	}
	held, err := lockOut(ctx, s.visible.Root(), s.directories.prepare)
	if err != nil {
		return err
	}
	defer held.Release()
	lives, endLives := context.WithCancelCause(context.WithoutCancel(ctx))
	s.ctx = lives
	defer s.await()
	defer endLives(errStopping)
	if err := s.restore(); err != nil {
		return err
	}
	return s.serve(ctx, func() { endLives(errStopping) })
}

// serve answers the plugin until the context ends.
func (s *Supervisor) serve(ctx context.Context, endLives func()) error {
	listener, err := mps.Listen(s.visible)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	klog.FromContext(ctx).Info("Supervising MPS daemons", "socket", s.visible.Socket(), "driverRoot", s.options.DriverRoot)
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", s.visible.Socket(), err)
	case <-ctx.Done():
	}
	// Requests that wait for a daemon get to know that it will not come.
	endLives()
	s.await()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(closing); err != nil {
		_ = server.Close() // Who still asks has waited too long.
	}
	s.directories.leave()
	return nil
}

// await returns when all lives are over.
func (s *Supervisor) await() {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.lives))
	s.mu.Unlock()
	for _, l := range all {
		<-l.over
	}
}

// restore begins the lives of the daemons that an earlier supervisor has left on the disk, and clears away what cannot live.
func (s *Supervisor) restore() error {
	ids, err := s.directories.known()
	if err != nil {
		return err
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		spec, err := s.directories.readSpec(s.bootID, id)
		if err == nil {
			s.begin(spec, true)
			continue
		}
		logger := klog.FromContext(s.ctx).WithValues("daemon", id)
		logger.Info("Forgetting an MPS daemon: there is no valid specification of it", "reason", err)
		// A request for the same daemon waits its turn; none waits for another's.
		release, err := s.turns.take(s.ctx, id)
		if err != nil {
			return err
		}
		go func() {
			defer release()
			if err := s.clear(id); err != nil {
				logger.Error(err, "What is left of an MPS daemon cannot be removed")
			}
		}()
	}
	return nil
}

// begin starts a life. The caller has the daemon's turn, or is alone.
func (s *Supervisor) begin(spec mps.Daemon, proven bool) *life {
	l := newLife(spec, proven)
	ctx, end := context.WithCancelCause(s.ctx)
	l.end = end
	s.mu.Lock()
	s.lives[spec.ID] = l
	s.mu.Unlock()
	go s.live(ctx, l)
	return l
}

func (s *Supervisor) find(id string) *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lives[id]
}

// Start returns when the daemon is ready.
func (s *Supervisor) Start(ctx context.Context, spec mps.Daemon) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	release, err := s.turns.take(ctx, spec.ID)
	if err != nil {
		return err
	}
	defer release()
	l := s.find(spec.ID)
	if l != nil && (l.isOver() || !l.spec.Equal(spec)) {
		if s.ctx.Err() != nil {
			return errStopping
		}
		klog.FromContext(s.ctx).Info("MPS daemon is to be another, it is restarted", "daemon", spec.ID)
		if err := s.finish(l); err != nil {
			return err
		}
		l = nil
	}
	if l != nil {
		status, tries, _ := l.look()
		switch status.State {
		case mps.Ready:
			return s.verify(ctx, l)
		case mps.Failed:
			tries++ // the next one decides
			l.wake()
		}
		return s.awaitReady(ctx, l, tries)
	}
	if s.ctx.Err() != nil {
		return errStopping
	}
	if err := s.directories.make(spec.ID); err != nil {
		return errors.Join(err, s.directories.remove(spec.ID))
	}
	if err := s.directories.writeSpec(s.bootID, spec); err != nil {
		return errors.Join(err, s.directories.remove(spec.ID))
	}
	return s.awaitReady(ctx, s.begin(spec, false), 1)
}

// awaitReady waits until the daemon is ready, or has failed at that try or a later one. A daemon that was never ready is taken away then.
func (s *Supervisor) awaitReady(ctx context.Context, l *life, try int) error {
	for {
		status, tries, changed := l.look()
		switch {
		case status.State == mps.Ready:
			return nil
		case status.State == mps.Failed && tries >= try:
			err := errors.New(status.Error)
			if !l.isProven() {
				if left := s.finish(l); left != nil {
					return errors.Join(err, left) // It stays known with all it has, until it can be ended.
				}
				err = errors.Join(err, s.directories.remove(l.spec.ID))
			}
			return err
		}
		select {
		case <-changed:
		case <-l.over:
			return errStopping
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// isOver says whether the life has ended although the daemon is known: a process of it could not be ended.
func (l *life) isOver() bool {
	select {
	case <-l.over:
		return true
	default:
		return false
	}
}

func (l *life) isProven() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.proven
}

// verify makes sure that a daemon which is ready still has its directories, answers, and has all its defaults.
func (s *Supervisor) verify(ctx context.Context, l *life) error {
	if err := s.directories.make(l.spec.ID); err != nil {
		return err
	}
	if err := s.hasDirectories(l); err != nil {
		return err
	}
	c, err := newControl(s.options, l.spec)
	if err != nil {
		return err
	}
	if _, err := c.ask(ctx, "get_server_list"); errors.Is(err, context.Canceled) {
		return fmt.Errorf("ask whether the MPS daemon answers: %w", err) // Who asked has gone: that says nothing of the daemon, and nobody should kill it for that.
	} else if err != nil {
		return fmt.Errorf("the MPS daemon runs but does not answer (to restart it, which ends its clients, kill process %d): %w", l.pid(), err)
	}
	return c.apply(ctx, l.spec)
}

// hasDirectories says whether the daemon has the directories that containers would be given, and not others that someone has removed since.
func (s *Supervisor) hasDirectories(l *life) error {
	pid := l.pid()
	for outside, inside := range map[string]string{s.visible.Pipes(l.spec.ID): namespace.Pipes, s.visible.Shm(l.spec.ID): namespace.SharedMemory} {
		have, err := os.Stat(ofProcess(procRoot, pid, filepath.Join("root", inside)))
		if errors.Is(err, fs.ErrNotExist) {
			return nil // It has ended at this moment, and is started again with what is there.
		}
		if err != nil {
			return fmt.Errorf("look at the directories of the MPS daemon: %w", err)
		}
		if want, err := os.Stat(outside); err != nil || !os.SameFile(have, want) {
			return fmt.Errorf("%s was removed under the MPS daemon, so no container can become its client any more (to restart it, which ends its clients, kill process %d)", outside, pid)
		}
	}
	return nil
}

func (l *life) pid() int {
	status, _, _ := l.look()
	return status.PID
}

// Stop returns when no process and no directory of the daemon is left.
func (s *Supervisor) Stop(ctx context.Context, id string) error {
	release, err := s.turns.take(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	if l := s.find(id); l != nil {
		if err := s.finish(l); err != nil {
			return err
		}
	}
	return s.clear(id)
}

// finish ends a life. If a process of it is left, the daemon stays known, so that it is not taken for gone.
func (s *Supervisor) finish(l *life) error {
	l.end(errRemoved)
	<-l.over
	if l.left != nil {
		if err := s.kin(l.spec.ID).end(brief); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.lives, l.spec.ID)
	return nil
}

// kin is whose processes a daemon's are.
func (s *Supervisor) kin(id string) kin {
	k := kin{mark: mark(s.visible, id), groups: []string{s.groups}, proc: procRoot}
	var run runRecord
	if err := s.directories.read(id, runFile, &run); err == nil && run.Groups != "" {
		k.groups = append(k.groups, run.Groups)
	}
	return k
}

// clear takes away what is left of a daemon that does not live.
func (s *Supervisor) clear(id string) error {
	if err := s.kin(id).end(patient); err != nil {
		return err
	}
	return s.directories.remove(id)
}

// List says which daemons there are, by ID.
func (s *Supervisor) List() []mps.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []mps.Status{}
	for _, id := range slices.Sorted(maps.Keys(s.lives)) {
		status, _, _ := s.lives[id].look()
		all = append(all, status)
	}
	return all
}
