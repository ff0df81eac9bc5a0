// Package lock serializes claims on one GPU, and calls for one claim. It works within this process
// and across processes.
//
// Locks have names. A lock has two layers: a fair queue within the process, and a file lock between
// processes. Processes compete for the file lock only while two instances of the plugin overlap.
//
// [Set.Acquire] and [Guard.Add] take several names at once or none, so no caller holds one of these
// names while it waits for another. That excludes deadlocks, and a hung GPU delays only the callers
// that need it. Guard.Add keeps the locks that the guard already has. So callers take a claim's
// lock first and then its GPUs' locks, never the reverse. A wait ends with the caller's context.
//
// A name is a whole file or a part of a shared file. A part is locked as one byte of the file,
// which a hash of the name chooses. Each GPU has its own file. All claims share one file, so that
// calls need not create and remove files.
//
// /proc/locks shows the lock of a GPU as FLOCK and that of a claim as OFDLCK. When a process dies,
// the kernel releases its locks at once. The lock files stay.
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

// Set manages the locks in one directory.
type Set struct {
	dir string

	mu    sync.Mutex
	queue queue
}

// NewSet returns the locks in the directory dir. It creates dir if needed.
func NewSet(dir string) (*Set, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory for locks: %w", err)
	}
	if err := durable.CheckDir(dir); err != nil {
		return nil, fmt.Errorf("check the directory for locks: %w", err)
	}
	return &Set{dir: dir, queue: queue{since: map[string]time.Time{}}}, nil
}

// Name says what to lock: a file, or a part of a file.
type Name struct {
	File string
	// Part selects a part of the file. Different parts are locked independently. If Part is empty, the
	// whole file is locked.
	Part string
}

func (n Name) String() string {
	if n.Part == "" {
		return n.File
	}
	return n.File + "/" + n.Part
}

// Guard is a group of acquired locks.
type Guard struct {
	set   *Set
	locks []lockedFile
	// Waited means that at least one lock was not free at once. What the caller read before may be out
	// of date then.
	Waited bool
}

type lockedFile struct {
	name Name
	file lockFile
}

// BusyError means that a lock could not be taken in time because another call or process has it.
type BusyError struct{ error }

func (e *BusyError) Unwrap() error { return e.error }

// Acquire takes all locks, or none. Its error is a [BusyError] only if another call or process has
// a lock.
func (s *Set) Acquire(ctx context.Context, names ...Name) (*Guard, error) {
	h := &Guard{set: s}
	if err := h.Add(ctx, names...); err != nil {
		return nil, err
	}
	return h, nil
}

// Add takes more locks, all or none of them. The guard keeps its earlier locks while Add waits, and
// also if Add fails.
func (h *Guard) Add(ctx context.Context, names ...Name) error {
	for _, name := range names {
		if !filepath.IsLocal(name.File) || filepath.Base(name.File) != name.File {
			return fmt.Errorf("%q is no valid name of a lock file", name.File)
		}
	}
	place := h.set.nextTicket()
	for {
		waited, err := h.set.acquire(ctx, place, keys(names))
		h.Waited = h.Waited || waited
		if err != nil {
			return &BusyError{fmt.Errorf("wait for the lock %s: %w", strings.Join(keys(names), ", "), err)}
		}
		locks, busy, err := h.set.tryFlockAll(names)
		if err == nil && busy >= 0 {
			h.Waited = true
			locks, err = h.set.waitForProcess(ctx, names, busy)
		} else if err != nil {
			h.set.release(keys(names))
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

// waitForProcess waits until the other process releases the lock names[busy]. Meanwhile it releases
// the other names in this process's queue. It returns all the locks, or none if the caller must try
// again.
func (s *Set) waitForProcess(ctx context.Context, names []Name, busy int) ([]lockedFile, error) {
	contended := names[busy]
	others := slices.Delete(slices.Clone(names), busy, busy+1)
	s.release(keys(others))
	file, err := s.waitFlock(ctx, contended)
	if err != nil {
		s.release([]string{contended.String()})
		return nil, err
	}
	if s.tryAcquire(keys(others)) {
		locks, busy, err := s.tryFlockAll(others)
		if err == nil && busy < 0 {
			return append(locks, lockedFile{contended, file}), nil
		}
		s.release(keys(others))
		if err != nil {
			_ = file.Close()
			s.release([]string{contended.String()})
			return nil, err
		}
	}
	_ = file.Close()
	s.release([]string{contended.String()})
	return nil, nil
}

func keys(names []Name) []string {
	keys := make([]string, len(names))
	for i, name := range names {
		keys[i] = name.String()
	}
	return keys
}

// Release releases all locks of the guard, in the reverse order.
func (h *Guard) Release() {
	for i := len(h.locks) - 1; i >= 0; i-- {
		t := h.locks[i]
		_ = t.file.Close()
		h.set.release([]string{t.name.String()})
	}
	h.locks = nil
}
