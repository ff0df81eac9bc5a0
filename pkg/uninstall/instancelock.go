package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// instanceLockFile is a file in the plugin directory, which all plugin instances on the node share.
const instanceLockFile = "instances.lock"

// instanceLockPoll is how often a starting plugin instance tries to get the lock while another one
// cleans up the node.
const instanceLockPoll = 20 * time.Millisecond

// InstanceLock is a flock that tells plugin instances of any version whether others run on the
// node. Each instance has the shared lock while it runs. The cleanup of the node needs the
// exclusive lock. The kernel releases the lock of a killed instance.
type InstanceLock struct{ file *flock.Flock }

// AcquireInstanceLock takes the shared lock, and creates the plugin directory if it is missing. It
// waits only while another plugin instance cleans up the node, which removes the directory.
func AcquireInstanceLock(ctx context.Context, pluginDir string) (*InstanceLock, error) {
	for {
		if err := os.MkdirAll(pluginDir, 0o755); err != nil {
			return nil, fmt.Errorf("create the plugin directory: %w", err)
		}
		// Only root may be able to write to the directory: its files control what this process does as
		// root, and which hook the container runtime runs.
		if err := durable.CheckDir(pluginDir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("use the plugin directory: %w", err)
		}
		l := &InstanceLock{flock.New(filepath.Join(pluginDir, instanceLockFile), flock.SetPermissions(0o600),
			flock.SetFlag(os.O_CREATE|os.O_RDONLY|unix.O_NONBLOCK))}
		_, err := l.file.TryRLockContext(ctx, instanceLockPoll)
		if err == nil && l.inPlace() {
			return l, nil
		}
		l.Release()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("acquire the shared instance lock: %w", err)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// TryExclusive gives up the shared lock and tries to take the exclusive lock. It returns true if no
// other plugin instance has a lock; then no instance can start until Release. If several instances
// call TryExclusive at the same time, at least one gets true.
func (l *InstanceLock) TryExclusive() (bool, error) {
	l.Release() // release first: if two instances upgraded their shared locks, both would fail
	// This lock must not create the file: if the file is missing, another plugin instance has cleaned
	// up the node.
	l.file = flock.New(l.file.Path(), flock.SetFlag(os.O_RDONLY|unix.O_NONBLOCK))
	alone, err := l.file.TryLock()
	if errors.Is(err, fs.ErrNotExist) || alone && !l.inPlace() {
		l.Release()
		return false, nil // another instance has cleaned up the node; new instances lock a new file
	}
	if err != nil {
		return false, fmt.Errorf("check whether another plugin instance runs: %w", err)
	}
	return alone, nil
}

// Release gives up the shared or exclusive lock. It may be called more than once.
func (l *InstanceLock) Release() { _ = l.file.Close() }

// inPlace reports whether the path still leads to the locked file. The cleanup of the node removes
// that file.
func (l *InstanceLock) inPlace() bool {
	held, err := l.file.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(l.file.Path())
	return err == nil && os.SameFile(held, now)
}
