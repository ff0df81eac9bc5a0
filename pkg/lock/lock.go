// Package lock keeps two claims from touching one GPU at a time, and two calls from touching one claim, in this process and across processes.
//
// Locks are named. A name's lock is two layers: a fair queue within the process, and below it a lock of a file, which is contended only while two instances
// of the plugin overlap. [Set.Acquire] and [Held.Add] take several names at once or none: nobody holds one of them while waiting for another. So no two can
// wait for each other, and what hangs with one GPU delays those alone who want that one. What is held already stays held while more is added: callers take
// a claim first and then its GPUs, never the other way. Waiting ends with the caller's context.
//
// A name is a file, or one of any number that share a file: then a byte of it is locked, whose place is made of the name. A GPU has a file of its own. Claims, of
// which there is always another one, share one, so that no file has to be made and removed with each call.
//
// A process that dies loses its locks at once. Lock files stay.
package lock

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

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

// Name is what is locked: a file, or a part of one.
type Name struct {
	File string
	// Part, where it is not empty, is locked alone of all that share the file.
	Part string
}

func (n Name) String() string {
	if n.Part == "" {
		return n.File
	}
	return n.File + "/" + n.Part
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
	file opened
}

// BusyError says that a lock was waited for in vain, because another call or another process holds it.
type BusyError struct{ error }

func (e *BusyError) Unwrap() error { return e.error }

// Acquire takes all the locks, or none. Its error is a [BusyError] only where somebody holds one.
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
		waited, err := h.set.enter(ctx, place, keys(names))
		h.Waited = h.Waited || waited
		if err != nil {
			return &BusyError{fmt.Errorf("wait for the lock %s: %w", strings.Join(keys(names), ", "), err)}
		}
		locks, busy, err := h.set.flocks(names)
		if err == nil && busy >= 0 {
			h.Waited = true
			locks, err = h.set.elsewhere(ctx, names, busy)
		} else if err != nil {
			h.set.leave(keys(names))
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
	s.leave(keys(others))
	file, err := s.flock(ctx, one)
	if err != nil {
		s.leave([]string{one.String()})
		return nil, err
	}
	if s.try(keys(others)) {
		locks, busy, err := s.flocks(others)
		if err == nil && busy < 0 {
			return append(locks, taken{one, file}), nil
		}
		s.leave(keys(others))
		if err != nil {
			_ = file.Close()
			s.leave([]string{one.String()})
			return nil, err
		}
	}
	_ = file.Close()
	s.leave([]string{one.String()})
	return nil, nil
}

func keys(names []Name) []string {
	keys := make([]string, len(names))
	for i, name := range names {
		keys[i] = name.String()
	}
	return keys
}

// Release gives all back, last taken first.
func (h *Held) Release() {
	for i := len(h.locks) - 1; i >= 0; i-- {
		t := h.locks[i]
		_ = t.file.Close()
		h.set.leave([]string{t.name.String()})
	}
	h.locks = nil
}
