package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

const (
	specFile = "spec.json"
	runFile  = "run.json"
	// shared is what the vendor's daemon gives a directory of pipes that it makes itself, and the sticky bit: servers run as their clients' users.
	shared = 0o777 | fs.ModeSticky
	// selinux is the extended attribute that holds a file's label.
	selinux = "security.selinux"
)

// specRecord is the content of spec.json.
type specRecord struct {
	BootID string     `json:"bootID"`
	Daemon mps.Daemon `json:"daemon"`
}

// runRecord is the content of run.json. A process is named by its number and when it started, in clock ticks since the boot. Before there is one it says
// where it will be.
type runRecord struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime"`
	// Groups are the control groups in which it was started, in the words of /proc/PID/cgroup.
	Groups string `json:"groups,omitempty"`
}

// directories are the files of all daemons.
type directories struct {
	paths mps.Paths // as this process sees them
	label string
	// sharedMemory is the size of /dev/shm of each daemon and its clients.
	sharedMemory string
	// shm is held while the directory for all shared memory comes or goes.
	shm *sync.Mutex
}

// prepare makes what is there before any daemon.
func (d directories) prepare() error {
	if err := os.MkdirAll(filepath.Dir(d.paths.Root()), 0o750); err != nil {
		return fmt.Errorf("create the plugin's directory: %w", err)
	}
	return durable.MakeDir(durable.OS{}, d.paths.Root())
}

// make makes a daemon's directories. Those that are there stay the same ones: running containers hold them.
func (d directories) make(id string) error {
	if err := durable.MakeDir(durable.OS{}, d.paths.Dir(id)); err != nil {
		return err
	}
	d.shm.Lock()
	defer d.shm.Unlock()
	if err := d.makeShmDir(); err != nil {
		return err
	}
	for _, dir := range []struct {
		path  string
		mode  fs.FileMode
		space space
	}{
		{d.paths.Pipes(id), shared, space{mebibytes(pipeSpace), pipeFiles}},
		{d.paths.Logs(id), 0o700, space{}},
		{d.paths.Shm(id), shared, space{d.sharedMemory, shmFiles}},
	} {
		if err := os.Mkdir(dir.path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create a directory of MPS daemon %s: %w", id, err)
		}
		if err := dir.space.bound(dir.path); err != nil {
			return fmt.Errorf("create a directory of MPS daemon %s: %w", id, err)
		}
		if err := os.Chmod(dir.path, dir.mode); err != nil {
			return fmt.Errorf("open a directory of MPS daemon %s to its clients: %w", id, err)
		}
		if d.label == "" || dir.mode != shared {
			continue
		}
		if err := unix.Lsetxattr(dir.path, selinux, []byte(d.label), 0); err != nil {
			return fmt.Errorf("give %s the SELinux label %q (--selinux-label; leave it empty where SELinux is off): %w", dir.path, d.label, err)
		}
	}
	return nil
}

// empty takes away what clients have put in the way of a control daemon that is about to start; no process of it runs. The pipes are all made anew. The files
// in the shared memory may be of use to containers for more than MPS, and stay; the daemon would follow no link there, nor open a device.
func (d directories) empty(id string) error {
	for dir, harmless := range map[string]func(fs.FileMode) bool{
		d.paths.Pipes(id): func(fs.FileMode) bool { return false },
		d.paths.Shm(id):   func(mode fs.FileMode) bool { return mode.IsRegular() || mode.IsDir() },
	} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("look for what clients of MPS daemon %s have left: %w", id, err)
		}
		for _, e := range entries {
			if harmless(e.Type()) {
				continue
			}
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove what clients of MPS daemon %s have left: %w", id, err)
			}
		}
	}
	return nil
}

// makeShmDir makes the directory in a file system that every user of the host may write to, so it trusts nothing that is there.
func (d directories) makeShmDir() error {
	dir := d.paths.ShmDir()
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create the directory for shared memory (is the host's %s mounted?): %w", filepath.Dir(dir), err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("look at the directory for shared memory: %w", err)
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || !ok || int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("%s is not a directory of root's: someone else has made it, remove it", dir)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // to be passed through, not listed
		return fmt.Errorf("create the directory for shared memory: %w", err)
	}
	return nil
}

// remove takes a daemon's directories away, its specification first: what is left of the rest is no daemon.
func (d directories) remove(id string) error {
	dir := d.paths.Dir(id)
	if _, err := os.Lstat(dir); err == nil {
		if err := durable.Remove(durable.OS{}, filepath.Join(dir, specFile)); err != nil {
			return err
		}
	}
	err := errors.Join(unbound(d.paths.Pipes(id)), unbound(d.paths.Shm(id)))
	for _, path := range []string{d.paths.Pipes(id), d.paths.Shm(id)} {
		if err == nil {
			err = removeBoth(path)
		}
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		return fmt.Errorf("remove the directories of MPS daemon %s: %w", id, err)
	}
	d.shm.Lock()
	_ = os.Remove(d.paths.ShmDir()) // The last one; where others are, it fails.
	d.shm.Unlock()
	if err := (durable.OS{}).SyncDir(d.paths.Root()); err != nil {
		return fmt.Errorf("remove the directories of MPS daemon %s: %w", id, err)
	}
	return nil
}

// leave removes what no daemon needs when there is none: with the plugin gone before, there is nobody else to do it.
func (d directories) leave() {
	root := d.paths.Root()
	ids, err := d.known()
	if err != nil || len(ids) > 0 {
		return
	}
	for _, name := range []string{d.paths.Socket(), filepath.Join(root, lockFile), root, filepath.Dir(root)} {
		_ = os.Remove(name) // A directory that others use is not empty, and stays.
	}
}

func (d directories) writeSpec(bootID string, spec mps.Daemon) error {
	return d.write(spec.ID, specFile, specRecord{BootID: bootID, Daemon: spec})
}

// readSpec gives the specification of a daemon of this boot.
func (d directories) readSpec(bootID, id string) (mps.Daemon, error) {
	var record specRecord
	if err := d.read(id, specFile, &record); err != nil {
		return mps.Daemon{}, err
	}
	if record.BootID != bootID {
		return mps.Daemon{}, errors.New("it is of an earlier boot")
	}
	if record.Daemon.ID != id {
		return mps.Daemon{}, fmt.Errorf("%s is that of daemon %.100q", specFile, record.Daemon.ID)
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

// known lists the daemons that have a directory, on the disk or for shared memory.
func (d directories) known() ([]string, error) {
	var ids []string
	for _, dir := range []string{d.paths.Root(), d.paths.ShmDir()} {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list the MPS daemons: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && mps.ValidID(e.Name()) {
				ids = append(ids, e.Name())
			}
		}
	}
	return ids, nil
}
