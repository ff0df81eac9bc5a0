package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// lockFile keeps a second supervisor waiting. Its name is no daemon's ID.
const lockFile = "supervisor_lock"

// lockOut waits until no other supervisor has the directory locked, and keeps it locked until that is released. prepare makes the directory, which the one before
// may remove as the last of what it had.
func lockOut(ctx context.Context, root string, prepare func() error) (*lock.Held, error) {
	for {
		if err := prepare(); err != nil {
			return nil, err
		}
		held, err := locked(ctx, root)
		if errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("another supervisor of MPS daemons runs on this node: %w", err)
		}
		return held, nil
	}
}

func locked(ctx context.Context, root string) (*lock.Held, error) {
	locks, err := lock.NewSet(root)
	if err != nil {
		return nil, err
	}
	return locks.Acquire(ctx, lock.Name{File: lockFile})
}
