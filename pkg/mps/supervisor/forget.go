package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// forgetWait is how long Forget waits for someone else who has the lock: two that forget take microseconds, and a supervisor that lives keeps it.
const forgetWait = 2 * time.Second

// Forget removes what a daemon has on the disk, where no supervisor lives: the daemons of one that is gone have gone with its Pod. One that has survived, because
// it hangs in the NVIDIA driver, is not forgotten. proc is where the node's processes are seen. A supervisor that comes at this moment waits for it, and
// finds nothing.
func Forget(ctx context.Context, paths mps.Paths, proc, id string) error {
	if _, err := os.Lstat(paths.Root()); errors.Is(err, fs.ErrNotExist) {
		return nil // where no supervisor has been there is no daemon
	}
	ctx, cancel := context.WithTimeout(ctx, forgetWait)
	defer cancel()
	held, err := locked(ctx, paths.Root())
	if ctx.Err() != nil && err != nil {
		err = fmt.Errorf("its supervisor is starting or ending at this moment: %w", err)
	}
	if err != nil {
		return fmt.Errorf("remove MPS daemon %s: %w", id, err)
	}
	defer held.Release()
	return forget(directories{paths: paths, shm: new(sync.Mutex)}, proc, id)
}

func forget(d directories, proc, id string) error {
	var run runRecord
	if err := d.read(id, runFile, &run); err == nil {
		left, err := survivors(run, kin{mark: mark(d.paths, id), groups: []string{run.Groups}, proc: proc})
		if err != nil {
			return fmt.Errorf("remove MPS daemon %s: %w", id, err)
		}
		if len(left) > 0 {
			return fmt.Errorf("remove MPS daemon %s: its supervisor is gone, but its processes %v are not: bring the supervisor back (chart value mps.enabled), or reboot the node", id, left)
		}
	}
	return d.remove(id)
}

// RemoveAll removes what is left of daemons on a node that has none and will have none.
func RemoveAll(paths mps.Paths) error {
	d := directories{paths: paths, shm: new(sync.Mutex)}
	ids, err := d.known()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := d.remove(id); err != nil {
			return err
		}
	}
	for _, dir := range []string{paths.Root(), paths.ShmDir()} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove what MPS daemons had: %w", err)
		}
	}
	return nil
}

// survivors are the processes of a daemon that live without a supervisor. The control daemon is known by its start as well, should control groups have other
// names for this process than they had for its supervisor.
func survivors(run runRecord, of kin) ([]int, error) {
	pids, err := of.processes()
	if err != nil || len(pids) > 0 || run.PID == 0 {
		return pids, err
	}
	fields, err := statOf(of.proc, run.PID)
	if err != nil || fields[statState] == "Z" || fields[statState] == "X" || fields[statStart] != fmt.Sprint(run.StartTime) {
		return nil, nil //nolint:nilerr // a process that is not there is none
	}
	return []int{run.PID}, nil
}
