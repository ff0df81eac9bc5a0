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

// flockPoll is how often to try again to lock a file that another process has locked.
const flockPoll = 5 * time.Millisecond

const permissions = 0o600

// lockFile is an open and locked file. Closing it releases the lock.
type lockFile interface {
	Stat() (fs.FileInfo, error)
	Close() error
}

// tryFlockAll locks the files of all names, or none of them. If another process has locked one of
// the files, locks is nil and busy is that file's index in names.
func (s *Set) tryFlockAll(names []Name) (locks []lockedFile, busy int, err error) {
	for i, name := range names {
		file, err := s.tryFlock(name)
		if err == nil && file != nil {
			locks = append(locks, lockedFile{name, file})
			continue
		}
		for _, t := range locks {
			_ = t.file.Close()
		}
		return nil, i, err
	}
	return locks, -1, nil
}

// tryFlock locks the file of name. It returns nil if another process has locked it.
func (s *Set) tryFlock(name Name) (lockFile, error) {
	path := filepath.Join(s.dir, name.File)
	for {
		f, got, err := open(path, name.Part)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !got {
			return nil, f.Close()
		}
		same, err := isCurrent(f, path)
		if err == nil && same {
			return f, nil
		}
		if cerr := errors.Join(err, f.Close()); cerr != nil {
			return nil, fmt.Errorf("lock %s: %w", path, cerr)
		}
	}
}

// waitFlock waits until no other process has locked the file, and locks it. If the file was removed
// meanwhile, it creates and locks a new one.
func (s *Set) waitFlock(ctx context.Context, name Name) (lockFile, error) {
	poll := time.NewTicker(flockPoll)
	defer poll.Stop()
	for {
		if file, err := s.tryFlock(name); err != nil || file != nil {
			return file, err
		}
		select {
		case <-ctx.Done():
			return nil, &BusyError{fmt.Errorf("lock %s, which another process has locked: %w", filepath.Join(s.dir, name.String()), ctx.Err())}
		case <-poll.C:
		}
	}
}

// open opens the file at path and tries to lock it. If part is not empty, it locks only that part
// of the file. got is false if another process has the lock.
func open(path, part string) (f lockFile, got bool, err error) {
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

// lockPart tries to lock one byte of the file, which it chooses by a hash of part. Like a flock,
// the lock belongs to the open file, not to the process. Two parts with the same byte exclude each
// other, which does no harm.
func lockPart(file *os.File, part string) (got bool, err error) {
	sum := sha256.Sum256([]byte(part))
	const lastByte = 1<<62 - 1
	at := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(binary.BigEndian.Uint64(sum[:]) & lastByte), Len: 1}
	err = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &at)
	if errors.Is(err, unix.EAGAIN) { // another process has the lock (on Linux, EACCES would mean a security policy)
		return false, nil
	}
	return err == nil, os.NewSyscallError("fcntl", err)
}

func isCurrent(f lockFile, path string) (bool, error) {
	named, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(named, opened), nil
}
