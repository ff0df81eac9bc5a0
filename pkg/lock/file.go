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
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"
)

// flockPoll is how often a lock that another process holds is tried again.
const flockPoll = 5 * time.Millisecond

const permissions = 0o600

// opened is a file that is locked for as long as it is open.
type opened interface {
	Stat() (fs.FileInfo, error)
	Close() error
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
func (s *Set) tryFlock(name Name) (opened, error) {
	path := filepath.Join(s.dir, name.File)
	for {
		f, got, err := open(path, name.Part)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
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
func (s *Set) flock(ctx context.Context, name Name) (opened, error) {
	poll := time.NewTicker(flockPoll)
	defer poll.Stop()
	for {
		if file, err := s.tryFlock(name); err != nil || file != nil {
			return file, err
		}
		select {
		case <-ctx.Done():
			return nil, &BusyError{fmt.Errorf("lock %s, which another process holds: %w", filepath.Join(s.dir, name.String()), ctx.Err())}
		case <-poll.C:
		}
	}
}

// open opens the file, and locks it if it is free.
func open(path, part string) (f opened, got bool, err error) {
	if part == "" {
		whole := flock.New(path, flock.SetPermissions(permissions))
		if got, err = whole.TryLock(); err != nil {
			return nil, false, errors.Join(err, whole.Close())
		}
		return whole, got, nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, permissions)
	if err != nil {
		return nil, false, err
	}
	if got, err = lockPart(file, part); err != nil {
		return nil, false, errors.Join(err, file.Close())
	}
	return file, got, nil
}

// lockPart locks a byte of the file. Like a flock, the lock is of this opening of the file, not of the process. Two names at one byte, if there ever were any,
// would only wait for each other.
func lockPart(file *os.File, part string) (got bool, err error) {
	sum := sha256.Sum256([]byte(part))
	const lastByte = 1<<62 - 1
	at := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(binary.BigEndian.Uint64(sum[:]) & lastByte), Len: 1}
	err = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &at)
	if errors.Is(err, unix.EAGAIN) { // EACCES is a policy's refusal: Linux says no more than EAGAIN of a lock that is held
		return false, nil
	}
	return err == nil, os.NewSyscallError("fcntl", err)
}

func isNamed(f opened, path string) (bool, error) {
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
