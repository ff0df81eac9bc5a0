package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

// lockFile has the lock that a running supervisor holds, so that a second one waits for its end,
// and one for each daemon that a request works on. The name is no daemon's ID: an ID has no "_".
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
	locks, err := openLocks(root)
	if err != nil {
		return nil, err
	}
	return locks.Acquire(ctx, lockFile)
}

func openLocks(root string) (*lock.Set, error) { return lock.NewSet(filepath.Join(root, lockFile)) }

// lockDaemon lets only one request at a time start, change or stop a daemon.
func (s *Supervisor) lockDaemon(ctx context.Context, id string) (*lock.Guard, error) {
	held, err := s.locks.Acquire(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("wait until no other request starts or stops MPS daemon %s: %w", id, err)
	}
	return held, nil
}
