// Package lock serializes calls for one claim, and claims on one GPU, within this process and
// across processes.
//
// Locks have names. All locks of a [Set] are in one file: a lock is one byte of it, which a hash of
// the name chooses. The byte belongs to the open file of a [Guard], not to the process. So the same
// lock works between two calls and between two plugin instances, and when a process dies, the
// kernel releases its locks at once. /proc/locks shows them as OFDLCK.
//
// A file with flock(2) for each name would need a protocol of its own: a claim's file must be
// removed some day, while another caller may wait for it.
//
// [Set.Acquire] and [Guard.Add] take several names at once or none, so no caller holds one of these
// names while it waits for another. That excludes deadlocks, and a hung GPU delays only the callers
// that need it. Guard.Add keeps the locks that the guard already has. So callers take a claim's
// lock first and then its GPUs' locks, never the reverse. A wait ends with the caller's context.
//
// Within a process, callers that want the same name get it in the order of their arrival. A waiter
// for several names gets them when all are free at the same moment. Until then its free names are
// reserved for it, so that it cannot starve. A name that stays busy ends the reservation: its GPU
// may hang. For locks of another process, waiters try again from time to time.
package lock

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

const (
	// firstPause and longestPause are how long to wait before another attempt to take a lock that
	// another process may have. The pause doubles, because a lock that is not free soon may be a hung
	// GPU's, and ends when a lock of this process changes hands.
	firstPause   = 5 * time.Millisecond
	longestPause = 100 * time.Millisecond
	// reservation is how long one holder of a name may keep it before a waiter for this name and
	// others loses the reservation of the others. It is long for a claim that reads no hardware.
	reservation = 500 * time.Millisecond
)

// Set manages the locks in one file.
type Set struct {
	path string

	mu      sync.Mutex
	waiting []*waiter            // in the order of their arrival
	granted map[string]time.Time // when each name was granted that this process has
	pause   time.Duration
	poll    *time.Timer // serves the waiters again. It is nil while there are none.
}

// waiter is a caller that waits for names.
type waiter struct {
	file  *os.File
	names []string
	done  chan error // has nil when the waiter has its locks
	// busy has the names that were not free at the last attempt to lock them, and since when.
	busy map[string]time.Time
}

// NewSet returns the locks in the file at path. It creates the file's directory if needed.
func NewSet(path string) (*Set, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory for locks: %w", err)
	}
	if err := durable.CheckDir(dir); err != nil {
		return nil, fmt.Errorf("check the directory for locks: %w", err)
	}
	return &Set{path: path, granted: map[string]time.Time{}}, nil
}

// Guard is a group of acquired locks.
type Guard struct {
	set   *Set
	file  *os.File
	names []string
	// Waited means that at least one lock was not free at once. What the caller read before may be out
	// of date then.
	Waited bool
}

// BusyError means that a lock could not be taken in time because another call or process has it.
type BusyError struct{ error }

func (e *BusyError) Unwrap() error { return e.error }

var errReplaced = errors.New("the lock file was removed meanwhile: try again")

// Acquire takes all locks, or none. Its error is a [BusyError] only if another call or process has
// a lock.
func (s *Set) Acquire(ctx context.Context, names ...string) (*Guard, error) {
	g := &Guard{set: s}
	for {
		var err error
		if g.file, err = os.OpenFile(s.path, os.O_CREATE|os.O_RDWR, 0o600); err != nil {
			return nil, fmt.Errorf("open the lock file: %w", err)
		}
		if err = g.Add(ctx, names...); err == nil {
			return g, nil
		}
		g.Release()
		if !errors.Is(err, errReplaced) {
			return nil, err
		}
	}
}

// Add takes more locks, all or none of them. The guard keeps its earlier locks while Add waits, and
// also if Add fails. The names must be others than those of the earlier locks.
func (g *Guard) Add(ctx context.Context, names ...string) error {
	// Processes take locks in the same order. So of several that want overlapping names, one succeeds.
	w := &waiter{file: g.file, names: slices.Sorted(slices.Values(names)), done: make(chan error, 1), busy: map[string]time.Time{}}
	s := g.set
	s.mu.Lock()
	s.waiting = append(s.waiting, w)
	s.pause = firstPause
	s.serve()
	s.mu.Unlock()
	var err error
	select {
	case err = <-w.done:
	default:
		g.Waited = true
		err = s.wait(ctx, w)
	}
	if err != nil {
		return fmt.Errorf("lock %s in %s: %w", strings.Join(names, ", "), s.path, err)
	}
	g.names = append(g.names, names...)
	return nil
}

func (s *Set) wait(ctx context.Context, w *waiter) error {
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := slices.Index(s.waiting, w); at >= 0 {
		s.waiting = slices.Delete(s.waiting, at, at+1)
		s.serve()
		return &BusyError{ctx.Err()}
	}
	return <-w.done // it was served when the context ended
}

// serve gives the waiters their locks, first come first served. The caller holds s.mu.
func (s *Set) serve() {
	now, reserved := time.Now(), map[string]bool{}
	s.waiting = slices.DeleteFunc(s.waiting, func(w *waiter) bool {
		if !slices.ContainsFunc(w.names, func(name string) bool { return reserved[name] }) {
			locked, err := w.tryLock(s.path, now)
			if locked {
				for _, name := range w.names {
					s.granted[name] = now
				}
			}
			if locked || err != nil {
				w.done <- err
				return true
			}
		}
		hangs := func(name string) bool {
			since, busy := w.busy[name]
			return busy && now.Sub(since) >= reservation && now.Sub(s.granted[name]) >= reservation
		}
		if len(w.names) > 1 && !slices.ContainsFunc(w.names, hangs) {
			for _, name := range w.names {
				reserved[name] = true
			}
		}
		return false
	})
	if s.poll != nil {
		s.poll.Stop()
		s.poll = nil
	}
	if len(s.waiting) > 0 {
		s.poll = time.AfterFunc(s.pause, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pause = min(2*s.pause, longestPause)
			s.serve()
		})
	}
}

// tryLock takes all locks, or none. It notes in w.busy the name that another guard has.
func (w *waiter) tryLock(path string, now time.Time) (locked bool, err error) {
	for i, name := range w.names {
		err := setByte(w.file, unix.F_WRLCK, name)
		if err == nil {
			delete(w.busy, name)
			continue
		}
		for _, taken := range w.names[:i] {
			_ = setByte(w.file, unix.F_UNLCK, taken)
		}
		if !errors.Is(err, unix.EAGAIN) { // on Linux, EACCES would mean a security policy
			return false, err
		}
		if _, known := w.busy[name]; !known {
			w.busy[name] = now
		}
		return false, nil
	}
	// If the file was removed, other callers lock a new one.
	opened, err := w.file.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(opened, named) {
		return false, errReplaced
	}
	return err == nil, err
}

// setByte locks or unlocks the byte of a name. Two names with the same byte exclude each other,
// which does no harm.
func setByte(file *os.File, kind int16, name string) error {
	sum := sha256.Sum256([]byte(name))
	const lastByte = 1<<62 - 1
	at := unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: int64(binary.BigEndian.Uint64(sum[:]) & lastByte), Len: 1}
	return os.NewSyscallError("fcntl", unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &at))
}

// Release releases all locks of the guard. It may be called more than once.
func (g *Guard) Release() {
	s := g.set
	s.mu.Lock()
	defer s.mu.Unlock()
	// Closing alone is not enough: a child process has a copy of the open file until its exec.
	everything := unix.Flock_t{Type: unix.F_UNLCK, Whence: io.SeekStart}
	_ = unix.FcntlFlock(g.file.Fd(), unix.F_OFD_SETLK, &everything)
	_ = g.file.Close()
	for _, name := range g.names {
		delete(s.granted, name)
	}
	g.names = nil
	s.pause = firstPause
	s.serve()
}
