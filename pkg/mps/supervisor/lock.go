package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// lockOut waits until no other supervisor has the file locked, and keeps it locked until it is closed. prepare makes the file's directory.
func lockOut(ctx context.Context, path string, prepare func() error) (*os.File, error) {
	for {
		if err := prepare(); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the supervisor's lock: %w", err)
		}
		if err := flock(ctx, f); err != nil {
			return nil, fmt.Errorf("another supervisor of MPS daemons runs on this node and has %s locked: %w", path, err)
		}
		// The one before may have removed the file and its directory, as the last of what it had: then someone else can lock the name.
		if named(f, path) {
			return f, nil
		}
		_ = f.Close()
	}
}

// flock waits for the lock. If the context ends first, the file is left to the waiting, which ends with the process.
func flock(ctx context.Context, f *os.File) error {
	locked := make(chan error, 1)
	go func() {
		for {
			err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
			if !errors.Is(err, unix.EINTR) {
				locked <- err
				return
			}
		}
	}()
	select {
	case err := <-locked:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func named(f *os.File, path string) bool {
	open, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(open, there)
}

// Forget removes what a daemon has on the disk, where no supervisor lives: the daemons of one that is gone have gone with its Pod. A supervisor that comes at
// this moment waits for it, and finds nothing.
func Forget(paths mps.Paths, id string) error {
	path := filepath.Join(paths.Root(), lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // where no supervisor has been there is no daemon
	}
	if err != nil {
		return fmt.Errorf("open the supervisor's lock: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("remove MPS daemon %s: its supervisor is starting or ending at this moment: %w", id, err)
	}
	if !named(f, path) {
		return fmt.Errorf("remove MPS daemon %s: its supervisor has ended at this moment: it is tried again", id)
	}
	return directories{paths: paths, shm: new(sync.Mutex)}.remove(id)
}
