// Package lock keeps two claims from touching one GPU at a time, and two calls from touching one claim, in this process and across processes.
//
// Locks are named. A name's lock is two layers: a fair queue within the process, and below it a flock, which is contended only while two instances
// of the plugin overlap. [Set.Acquire] takes several names in the order given; callers take a claim first and then its GPUs, sorted, so that no two
// can wait for each other. Waiting ends with the caller's context.
//
// A process that dies loses its flocks at once. Lock files of GPUs stay (there are as many as GPUs); a claim's is removed with its last use.
package lock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gofrs/flock"
)

// flockPoll is how often a flock that another process holds is tried again.
const flockPoll = 5 * time.Millisecond

// Set is the locks of one directory.
type Set struct {
	dir string

	mu     sync.Mutex
	queues map[string]*queue
}

// queue hands one name from holder to holder, first come first served.
type queue struct {
	waiting []chan struct{} // the first is the holder's
}

// NewSet makes the directory if needed.
func NewSet(dir string) (*Set, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory for locks: %w", err)
	}
	return &Set{dir: dir, queues: map[string]*queue{}}, nil
}

// Name is what is locked: a file name.
type Name struct {
	File string
	// Temporary locks' files are removed with their last use.
	Temporary bool
}

// Held is a group of locks that were taken.
type Held struct {
	set   *Set
	locks []taken
	// Waited says that at least one lock was not free at once, so what was read before may be out of date.
	Waited bool
}

type taken struct {
	name Name
	file *flock.Flock
}

// Acquire takes the locks in the order given, or none.
func (s *Set) Acquire(ctx context.Context, names ...Name) (*Held, error) {
	h := &Held{set: s}
	if err := h.Add(ctx, names...); err != nil {
		h.Release()
		return nil, err
	}
	return h, nil
}

// Add takes further locks. On error those taken before are still held.
func (h *Held) Add(ctx context.Context, names ...Name) error {
	for _, name := range names {
		if !filepath.IsLocal(name.File) || filepath.Base(name.File) != name.File {
			return fmt.Errorf("%q cannot name a lock's file", name.File)
		}
		waited, err := h.set.enter(ctx, name.File)
		h.Waited = h.Waited || waited
		if err != nil {
			return fmt.Errorf("wait for the lock %s: %w", name.File, err)
		}
		file, waited, err := h.set.flock(ctx, name)
		h.Waited = h.Waited || waited
		if err != nil {
			h.set.leave(name.File)
			return err
		}
		h.locks = append(h.locks, taken{name, file})
	}
	return nil
}

// Release gives all back, last taken first.
func (h *Held) Release() {
	for i := len(h.locks) - 1; i >= 0; i-- {
		t := h.locks[i]
		if t.name.Temporary {
			// Removed while still held: whoever waits on this file finds out that it is not the named one any more.
			_ = os.Remove(t.file.Path())
		}
		_ = t.file.Close()
		h.set.leave(t.name.File)
	}
	h.locks = nil
}

// Files lists the lock files that are there: of locks that are held, of GPUs, and of temporary locks whose holder was killed.
func (s *Set) Files() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list the locks: %w", err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (s *Set) enter(ctx context.Context, name string) (waited bool, err error) {
	s.mu.Lock()
	q := s.queues[name]
	if q == nil {
		q = &queue{}
		s.queues[name] = q
	}
	turn := make(chan struct{})
	q.waiting = append(q.waiting, turn)
	if len(q.waiting) == 1 {
		s.mu.Unlock()
		return false, nil
	}
	s.mu.Unlock()
	select {
	case <-turn:
		return true, nil
	case <-ctx.Done():
		s.abandon(name, turn)
		return true, ctx.Err()
	}
}

// abandon takes a waiter out of the queue, who may have become the holder in the meantime.
func (s *Set) abandon(name string, turn chan struct{}) {
	s.mu.Lock()
	q := s.queues[name]
	if q.waiting[0] == turn {
		s.mu.Unlock()
		s.leave(name)
		return
	}
	defer s.mu.Unlock()
	for i, w := range q.waiting {
		if w == turn {
			q.waiting = append(q.waiting[:i], q.waiting[i+1:]...)
			return
		}
	}
}

func (s *Set) leave(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[name]
	q.waiting = q.waiting[1:]
	if len(q.waiting) == 0 {
		delete(s.queues, name)
		return
	}
	close(q.waiting[0])
}

// flock locks the file of that name; a file that was removed meanwhile is not the one of that name any more.
func (s *Set) flock(ctx context.Context, name Name) (_ *flock.Flock, waited bool, _ error) {
	path := filepath.Join(s.dir, name.File)
	for {
		f := flock.New(path, flock.SetPermissions(0o600))
		got, err := f.TryLock()
		if err == nil && !got {
			waited = true
			got, err = f.TryLockContext(ctx, flockPoll)
		}
		if err != nil || !got {
			holder := ""
			if waited {
				holder = ", which another instance of the plugin holds"
			}
			return nil, waited, errors.Join(fmt.Errorf("lock %s%s: %w", path, holder, err), f.Close())
		}
		same, err := isNamed(f, path)
		if err == nil && same {
			return f, waited, nil
		}
		if cerr := errors.Join(err, f.Close()); cerr != nil {
			return nil, waited, fmt.Errorf("lock %s: %w", path, cerr)
		}
	}
}

func isNamed(f *flock.Flock, path string) (bool, error) {
	named, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	held, err := f.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(named, held), nil
}
