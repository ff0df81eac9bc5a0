package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// forgetWait is how long [Forget] waits for the lock of the supervisor's directory. Another Forget
// holds the lock for a moment, but a running supervisor holds it until it ends.
const forgetWait = 2 * time.Second

// Forget removes a daemon's files on a node without a running supervisor. It returns an error if a
// process of the daemon still runs (it may hang in the NVIDIA driver), or if a supervisor runs.
// proc is the mount point of a procfs with the node's processes.
func Forget(ctx context.Context, paths mps.Paths, proc, id string) error {
	if _, err := os.Lstat(paths.Root()); errors.Is(err, fs.ErrNotExist) {
		return nil // No supervisor has run on this node, so no daemon exists.
	}
	ctx, cancel := context.WithTimeout(ctx, forgetWait)
	defer cancel()
	held, err := acquireLock(ctx, paths.Root())
	if ctx.Err() != nil && err != nil {
		err = fmt.Errorf("its supervisor is starting or ending: %w", err)
	}
	if err != nil {
		return fmt.Errorf("remove MPS daemon %s: %w", id, err)
	}
	defer held.Release()
	d := directories{paths: paths}
	left, err := d.processesOf(id, proc).processes()
	if err != nil {
		return fmt.Errorf("remove MPS daemon %s: %w", id, err)
	}
	if len(left) > 0 {
		return fmt.Errorf("remove MPS daemon %s: its processes %v still run without a supervisor: "+
			"enable the supervisor (chart value mps.enabled), or reboot the node", id, left)
	}
	return d.remove(id)
}

// RemoveAll removes the files of all daemons. Call it only if no MPS daemon runs on this node and
// none will run again.
func RemoveAll(paths mps.Paths) error {
	d := directories{paths: paths}
	ids, err := d.daemonIDs()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := d.remove(id); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(paths.Root()); err != nil {
		return fmt.Errorf("remove the directories of all MPS daemons: %w", err)
	}
	return nil
}
