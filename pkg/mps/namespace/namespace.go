// Package namespace is where the driver's MPS programs run: a mount namespace of their own, in which the files of one daemon are at places that are the
// same for every daemon. It is what `gpu-mps daemon` does before it becomes nvidia-cuda-mps-control.
//
//	/tmp/nvidia-mps  the daemon's pipes: a short name, as the address of a Unix socket has 107 characters at most, and the one that its clients see
//	/tmp/nvidia-log  its logs
//	/dev/shm         its shared memory
//	/tmp/driver      the driver root
//	/tmp/bin         links to the driver's programs: the control daemon looks for its server in PATH
//	/tmp/lib         links to the driver's libraries, and to nothing else that is in their directory
//	/dev             is replaced where the driver has its device nodes elsewhere
//
// Clients write to the pipes and to the shared memory, root in a container among them, and the programs are root of the node. So no link in the two is
// followed, and they hold no device that could be opened (Linux 5.10 or later); and of what else can be seen all is read-only and without devices, but for
// /dev and /proc (Linux 5.12 or later).
//
// There is no change of the root directory: many a driver root is no system that could run a program. The programs are run by the dynamic linker and the
// C library of this image; a driver root that is a whole system has a C library too, which must not be found, because it fits its own linker only.
//
// Mounts propagate into the namespace but not out of it, so a volume that is unmounted elsewhere is not kept busy here, and nothing has to be unmounted:
// the mounts end with the processes.
package namespace

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/below"
)

// What the programs see.
const (
	Pipes        = "/tmp/nvidia-mps"
	Logs         = "/tmp/nvidia-log"
	SharedMemory = "/dev/shm"

	programs = "/tmp/bin"
	library  = "/tmp/lib"

	scratch    = "/tmp"
	driverRoot = "/tmp/driver"
)

// Environment tells a program where its programs and libraries are.
func Environment() []string {
	return []string{"PATH=" + programs + ":/usr/sbin:/usr/bin:/sbin:/bin", "LD_LIBRARY_PATH=" + library}
}

// View says what is put where. All paths are those of the caller.
type View struct {
	Pipes string `json:"pipes"`
	Logs  string `json:"logs"`
	Shm   string `json:"shm"`
	// DriverRoot holds the driver's files; the paths below are under it, with no links that lead out of it.
	DriverRoot string   `json:"driverRoot"`
	LibraryDir string   `json:"libraryDir"`
	Programs   []string `json:"programs"`
	// Dev has the driver's device nodes, where they are not in /dev.
	Dev string `json:"dev,omitempty"`
}

// String is the form that [Parse] takes.
func (v View) String() string {
	text, _ := json.Marshal(v) // of strings alone: it cannot fail
	return string(text)
}

// Parse reads what String wrote.
func Parse(text string) (View, error) {
	var v View
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return v, fmt.Errorf("read the view: %w", err)
	}
	for _, path := range append([]string{v.Pipes, v.Logs, v.Shm, v.DriverRoot, v.LibraryDir}, v.Programs...) {
		if !filepath.IsAbs(path) {
			return v, fmt.Errorf("read the view: %q is not an absolute path", path)
		}
	}
	if len(v.Programs) == 0 {
		return v, errors.New("read the view: it has no program")
	}
	return v, nil
}

// Exec turns this process into the view's first program. It returns only if that fails, and then the process must end: part of the view may be there.
func Exec(v View, args, env []string) error {
	runtime.LockOSThread() // The thread alone gets the namespace, and becomes the program.
	if err := enter(v); err != nil {
		return fmt.Errorf("make the mount namespace of the MPS daemon: %w", err)
	}
	name := filepath.Base(v.Programs[0])
	path := filepath.Join(programs, name)
	if err := unix.Exec(path, append([]string{name}, args...), env); err != nil {
		return fmt.Errorf("run %s: %w", v.Programs[0], err)
	}
	return nil
}

func enter(v View) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep its mounts to itself: %w", err)
	}
	if err := lockDown(); err != nil {
		return err
	}
	binds := []struct {
		from, to string
		flags    uintptr
		clients  bool // they write to it, or make the programs write to it
	}{
		{v.Shm, SharedMemory, 0, true},
		{v.Pipes, Pipes, 0, true},
		{v.Logs, Logs, 0, true},
		{v.DriverRoot, driverRoot, unix.MS_REC, false},
	}
	if v.Dev != "" {
		if err := replaceDev(v.Dev); err != nil {
			return err
		}
	}
	// All are opened before anything is mounted, because what is mounted may hide them.
	var sources []int
	for _, b := range binds {
		fd, err := unix.Open(b.from, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", b.from, err)
		}
		sources = append(sources, fd)
	}
	if err := unix.Mount("gpu-mps", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=4m"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", scratch, err)
	}
	for _, dir := range []string{Pipes, Logs, driverRoot, programs, library} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask: servers run as their clients' users
			return err
		}
	}
	for i, b := range binds {
		if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", sources[i]), b.to, "", unix.MS_BIND|b.flags, ""); err != nil {
			return fmt.Errorf("bind %s to %s: %w", b.from, b.to, err)
		}
		if !b.clients {
			continue
		}
		if err := unix.Mount("", b.to, "", unix.MS_BIND|unix.MS_REMOUNT|harmless, ""); err != nil {
			return fmt.Errorf("follow no link in %s: %w", b.from, err)
		}
	}
	return link(v)
}

// link makes the programs and libraries of the driver known by names that do not depend on where the driver has them.
func link(v View) error {
	root, err := unix.Open(driverRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the driver root: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	for _, program := range v.Programs {
		target, err := resolve(root, v.DriverRoot, program)
		if err != nil {
			return err
		}
		if err := os.Symlink(target, filepath.Join(programs, filepath.Base(program))); err != nil {
			return err
		}
	}
	dir, err := resolve(root, v.DriverRoot, v.LibraryDir)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the driver's libraries: %w", err)
	}
	for _, e := range entries {
		if !ofDriver(e.Name()) {
			continue
		}
		target, err := resolve(root, v.DriverRoot, filepath.Join(v.LibraryDir, e.Name()))
		if err != nil {
			continue // A link that leads nowhere is no library.
		}
		if err := os.Symlink(target, filepath.Join(library, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// ofDriver says whether a file is a library of the driver, by the names that all of them have.
func ofDriver(name string) bool {
	return (strings.HasPrefix(name, "libcuda") || strings.HasPrefix(name, "libnvidia-")) && strings.Contains(name, ".so")
}

// resolve follows the links of a path below the driver root as the driver's own system would.
func resolve(root int, prefix, path string) (string, error) {
	relative, err := filepath.Rel(prefix, path)
	if err != nil {
		return "", err
	}
	fd, err := below.Open(root, relative, 0)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
}
