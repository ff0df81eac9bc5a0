package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

const (
	specFile = "spec.json"
	runFile  = "run.json"
	// shared is the mode of directories that clients can write to. All users need access, because MPS
	// servers run as their clients' users. The sticky bit keeps a user from removing another user's
	// files.
	shared = 0o777 | fs.ModeSticky
	// selinux is the extended attribute that holds a file's SELinux label.
	selinux = "security.selinux"
)

// specRecord is the content of a daemon's file spec.json. BootID identifies the boot of the node
// during which a client requested Daemon.
type specRecord struct {
	BootID string     `json:"bootID"`
	Daemon mps.Daemon `json:"daemon"`
}

// runRecord is the content of a daemon's file run.json. PID and StartTime (in clock ticks since
// boot) together identify the control daemon's process. PID is also the session of its servers.
type runRecord struct {
	PID       int    `json:"pid"`
	StartTime string `json:"startTime"`
}

// directories creates, reads and removes the files of all daemons.
type directories struct {
	paths mps.Paths
	label string
	// sharedMemory is the size of each daemon's /dev/shm, as tmpfs(5) writes sizes. The daemon's
	// clients mount the same file system.
	sharedMemory string
}

// prepare creates the directory that holds the directories of all daemons.
func (d directories) prepare() error {
	if err := os.MkdirAll(filepath.Dir(d.paths.Root()), 0o750); err != nil {
		return fmt.Errorf("create the plugin's directory: %w", err)
	}
	return durable.MakeDir(durable.OS{}, d.paths.Root())
}

// make creates those of a daemon's directories that are missing. It keeps existing ones, because
// running containers may have mounted them.
func (d directories) make(id string) error {
	if err := durable.MakeDir(durable.OS{}, d.paths.Dir(id)); err != nil {
		return err
	}
	for _, dir := range []struct {
		path  string
		mode  fs.FileMode
		quota quota
	}{
		{d.paths.Pipes(id), shared, quota{mebibytes(pipeMebibytes), pipeFiles}},
		{d.paths.Logs(id), 0o700, quota{}},
		{d.paths.Shm(id), shared, quota{d.sharedMemory, shmFiles}},
	} {
		if err := os.Mkdir(dir.path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create a directory of MPS daemon %s: %w", id, err)
		}
		if err := dir.quota.mount(dir.path); err != nil {
			return fmt.Errorf("create a directory of MPS daemon %s: %w", id, err)
		}
		if err := os.Chmod(dir.path, dir.mode); err != nil {
			return fmt.Errorf("set the mode of a directory of MPS daemon %s: %w", id, err)
		}
		if d.label == "" || dir.mode != shared {
			continue
		}
		if err := unix.Lsetxattr(dir.path, selinux, []byte(d.label), 0); err != nil {
			return fmt.Errorf("set SELinux label %[2]q on %[1]s (--selinux-label; leave it empty where SELinux is off): %[3]w",
				dir.path, d.label, err)
		}
	}
	return nil
}

// removeClientFiles removes what clients left in a daemon's directories: everything in the pipe
// directory, because a new control daemon creates all pipes again, and from shared memory all but
// files and directories, which clients may use without MPS. No process of the daemon may run.
func (d directories) removeClientFiles(id string) error {
	for dir, harmless := range map[string]func(fs.FileMode) bool{
		d.paths.Pipes(id): func(fs.FileMode) bool { return false },
		d.paths.Shm(id):   func(mode fs.FileMode) bool { return mode.IsRegular() || mode.IsDir() },
	} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("list files that clients of MPS daemon %s left: %w", id, err)
		}
		for _, e := range entries {
			if harmless(e.Type()) {
				continue
			}
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove files that clients of MPS daemon %s left: %w", id, err)
			}
		}
	}
	return nil
}

// remove removes a daemon's directories. It removes spec.json first: without that file, the next
// supervisor does not start the daemon again.
func (d directories) remove(id string) error {
	dir := d.paths.Dir(id)
	if _, err := os.Lstat(dir); err == nil {
		if err := durable.Remove(durable.OS{}, filepath.Join(dir, specFile)); err != nil {
			return err
		}
	}
	var err error
	for _, path := range []string{d.paths.Pipes(id), d.paths.Shm(id)} {
		if err == nil {
			err = unmountAll(path)
		}
		if err == nil {
			err = removeUnmounted(path)
		}
	}
	err = errors.Join(err, os.RemoveAll(dir))
	if err == nil {
		err = durable.OS{}.SyncDir(d.paths.Root())
	}
	if err != nil {
		return fmt.Errorf("remove the directories of MPS daemon %s: %w", id, err)
	}
	return nil
}

// removeIfUnused removes the supervisor's socket, lock file and directory if no daemon exists. This
// matters if the plugin was uninstalled before the supervisor ended, because then nothing else
// removes them.
func (d directories) removeIfUnused() {
	root := d.paths.Root()
	ids, err := d.daemonIDs()
	if err != nil || len(ids) > 0 {
		return
	}
	for _, name := range []string{d.paths.Socket(), filepath.Join(root, lockFile), root, filepath.Dir(root)} {
		_ = os.Remove(name) // This fails for a directory in use, because it is not empty.
	}
}

func (d directories) writeSpec(bootID string, spec mps.Daemon) error {
	return d.write(spec.ID, specFile, specRecord{BootID: bootID, Daemon: spec})
}

// readSpec returns the daemon that spec.json describes. It returns an error if the file is missing,
// invalid or from an earlier boot.
func (d directories) readSpec(bootID, id string) (mps.Daemon, error) {
	var record specRecord
	if err := d.read(id, specFile, &record); err != nil {
		return mps.Daemon{}, err
	}
	if record.BootID != bootID {
		return mps.Daemon{}, errors.New("the description of the daemon is of an earlier boot")
	}
	if record.Daemon.ID != id {
		return mps.Daemon{}, fmt.Errorf("%s belongs to daemon %.100q", specFile, record.Daemon.ID)
	}
	return record.Daemon, record.Daemon.Validate()
}

func (d directories) write(id, name string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write %s of MPS daemon %s: %w", name, id, err)
	}
	return durable.Replace(durable.OS{}, filepath.Join(d.paths.Dir(id), name), append(data, '\n'))
}

func (d directories) read(id, name string, into any) error {
	path := filepath.Join(d.paths.Dir(id), name)
	data, err := durable.OS{}.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// processesOf returns the set of processes of a daemon. proc is where they are listed. Without a
// readable run.json the set is empty.
func (d directories) processesOf(id, proc string) processSet {
	set := processSet{proc: proc}
	_ = d.read(id, runFile, &set.run)
	return set
}

// daemonIDs returns the IDs of the daemons that have a directory, sorted.
func (d directories) daemonIDs() ([]string, error) {
	entries, err := os.ReadDir(d.paths.Root())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the MPS daemons: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && mps.ValidID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}
