package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
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
