// Package lock keeps two claims from touching one GPU at a time, and two calls from touching one claim, in this process and across processes.
//
// Locks are named. A name's lock is two layers: a fair queue within the process, and below it a flock, which is contended only while two instances
// of the plugin overlap. [Set.Acquire] and [Held.Add] take several names at once or none: nobody holds one of them while waiting for another. So no two can
// wait for each other, and what hangs with one GPU delays those alone who want that one. What is held already stays held while more is added: callers take
// a claim first and then its GPUs, never the other way. Waiting ends with the caller's context.
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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// flockPoll is how often a flock that another process holds is tried again.
const flockPoll = 5 * time.Millisecond

// Set is the locks of one directory.
type Set struct {
	dir string

	mu    sync.Mutex
	queue queue
}

// NewSet makes the directory if needed.
func NewSet(dir string) (*Set, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory for locks: %w", err)
	}
	if err := durable.CheckDir(dir); err != nil {
		return nil, fmt.Errorf("use the directory for locks: %w", err)
	}
	return &Set{dir: dir, queue: queue{taken: map[string]time.Time{}}}, nil
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

// Acquire takes all the locks, or none.
func (s *Set) Acquire(ctx context.Context, names ...Name) (*Held, error) {
	h := &Held{set: s}
	if err := h.Add(ctx, names...); err != nil {
		return nil, err
	}
	return h, nil
}

// Add takes further locks, all or none. Those taken before are held meanwhile, and after an error.
func (h *Held) Add(ctx context.Context, names ...Name) error {
	for _, name := range names {
		if !filepath.IsLocal(name.File) || filepath.Base(name.File) != name.File {
			return fmt.Errorf("%q cannot name a lock's file", name.File)
		}
	}
	place := h.set.place()
	for {
		waited, err := h.set.enter(ctx, place, files(names))
		h.Waited = h.Waited || waited
		if err != nil {
			return fmt.Errorf("wait for the lock %s: %w", strings.Join(files(names), ", "), err)
		}
		locks, busy, err := h.set.flocks(names)
		if err == nil && busy >= 0 {
			h.Waited = true
			locks, err = h.set.elsewhere(ctx, names, busy)
		} else if err != nil {
			h.set.leave(files(names))
		}
		if err != nil {
			return err
		}
		if len(locks) == len(names) {
			h.locks = append(h.locks, locks...)
			return nil
		}
	}
}

// elsewhere waits for a lock that another process holds, and lets go of the others meanwhile. It comes back with all or with none of them.
func (s *Set) elsewhere(ctx context.Context, names []Name, busy int) ([]taken, error) {
	one := names[busy]
	others := slices.Delete(slices.Clone(names), busy, busy+1)
	s.leave(files(others))
	file, err := s.flock(ctx, one)
	if err != nil {
		s.leave([]string{one.File})
		return nil, err
	}
	if s.try(files(others)) {
		locks, busy, err := s.flocks(others)
		if err == nil && busy < 0 {
			return append(locks, taken{one, file}), nil
		}
		s.leave(files(others))
		if err != nil {
			_ = file.Close()
			s.leave([]string{one.File})
			return nil, err
		}
	}
	_ = file.Close()
	s.leave([]string{one.File})
	return nil, nil
}

func files(names []Name) []string {
	files := make([]string, len(names))
	for i, name := range names {
		files[i] = name.File
	}
	return files
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
		h.set.leave([]string{t.name.File})
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

// flocks locks the files of all the names, or none: then busy is the one that another process holds.
func (s *Set) flocks(names []Name) (locks []taken, busy int, err error) {
	for i, name := range names {
		file, err := s.tryFlock(name)
		if err == nil && file != nil {
			locks = append(locks, taken{name, file})
			continue
		}
		for _, t := range locks {
			_ = t.file.Close()
		}
		return nil, i, err
	}
	return locks, -1, nil
}

// tryFlock is nil where another process holds the lock.
func (s *Set) tryFlock(name Name) (*flock.Flock, error) {
	path := filepath.Join(s.dir, name.File)
	for {
		f := flock.New(path, flock.SetPermissions(0o600))
		got, err := f.TryLock()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !got {
			return nil, f.Close()
		}
		same, err := isNamed(f, path)
		if err == nil && same {
			return f, nil
		}
		if cerr := errors.Join(err, f.Close()); cerr != nil {
			return nil, fmt.Errorf("lock %s: %w", path, cerr)
		}
	}
}

// flock waits for another process to let go of the file. One that was removed meanwhile is not the one of that name any more.
func (s *Set) flock(ctx context.Context, name Name) (*flock.Flock, error) {
	poll := time.NewTicker(flockPoll)
	defer poll.Stop()
	for {
		if file, err := s.tryFlock(name); err != nil || file != nil {
			return file, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s, which another process holds: %w", filepath.Join(s.dir, name.File), ctx.Err())
		case <-poll.C:
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
