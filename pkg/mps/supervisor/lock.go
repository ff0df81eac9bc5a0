package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// lockFile is the file that a running supervisor has locked, so that a second supervisor waits for
// its end. The name cannot be a daemon's ID, because an ID has no "_".
const lockFile = "supervisor_lock"

// acquireSupervisorLock waits until no other supervisor has locked the directory root, and locks
// it. The function prepare creates root. It is called whenever root is missing, because another
// supervisor may remove root when it ends.
func acquireSupervisorLock(ctx context.Context, root string, prepare func() error) (*lock.Guard, error) {
	for {
		if err := prepare(); err != nil {
			return nil, err
		}
		held, err := acquireLock(ctx, root)
		if errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil {
			continue
		}
		if busy := new(lock.BusyError); errors.As(err, &busy) {
			return nil, fmt.Errorf("another supervisor of MPS daemons runs on this node: %w", err)
		}
		if err != nil {
			return nil, fmt.Errorf("lock the directory of MPS daemons: %w", err)
		}
		return held, nil
	}
}

func acquireLock(ctx context.Context, root string) (*lock.Guard, error) {
	locks, err := lock.NewSet(filepath.Join(root, lockFile))
	if err != nil {
		return nil, err
	}
	return locks.Acquire(ctx, "supervisor")
}
