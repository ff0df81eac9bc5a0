// Package namespace prepares the mount namespace in which the driver's MPS programs run. Each
// daemon sees its own files under the same fixed paths. `gpu-mps daemon` enters the namespace
// before it executes nvidia-cuda-mps-control.
//
//	/tmp/nvidia-mps  the daemon's pipes, under the path that clients see too. It is short because
//	                 the address of a Unix socket has at most 107 characters
//	/tmp/nvidia-log  the daemon's logs
//	/dev/shm         the daemon's shared memory
//	/tmp/driver      the root of the driver's files
//	/tmp/bin         links to the driver's programs: the control daemon finds its server in PATH
//	/tmp/lib         links to the driver's libraries, and to no other file of their directory
//	/dev             replaced if the driver has its device nodes elsewhere
//
// Clients, even root in a container, can write to the pipes and to the shared memory, while the
// driver's programs run as root of the node. So the kernel follows no link and opens no device node
// in these directories (Linux 5.10 or later). Every other mount except /dev and /proc is read-only
// and without device nodes (Linux 5.12 or later).
//
// The root directory stays that of the supervisor's image, because many driver roots hold no
// complete system. So the driver's programs use this image's dynamic linker and C library. They
// must not find the C library of a driver root, because that one fits only its own dynamic linker.
//
// Mounts propagate into the namespace but not out of it. So the namespace does not keep a volume
// busy that is unmounted elsewhere. Nothing needs to be unmounted: the mounts end with the
// processes.
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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// These are paths in the mount namespace of the driver's programs.
const (
	Pipes        = "/tmp/nvidia-mps"
	Logs         = "/tmp/nvidia-log"
	SharedMemory = "/dev/shm"

	programDir = "/tmp/bin"
	libraryDir = "/tmp/lib"

	scratch    = "/tmp"
	driverRoot = "/tmp/driver"
)

// Environment returns PATH and LD_LIBRARY_PATH for a process in this mount namespace, so that it
// finds the driver's programs and libraries.
func Environment() []string {
	return []string{"PATH=" + programDir + ":/usr/sbin:/usr/bin:/sbin:/bin", "LD_LIBRARY_PATH=" + libraryDir}
}

// View describes the mounts that [Exec] makes for the driver's programs. All paths are those of the
// process that calls Exec.
type View struct {
	Pipes string `json:"pipes"`
	Logs  string `json:"logs"`
	Shm   string `json:"shm"`
	// DriverRoot holds the driver's files. LibraryDir and Programs are paths below DriverRoot, and no
	// link in them leads out of it.
	DriverRoot string   `json:"driverRoot"`
	LibraryDir string   `json:"libraryDir"`
	Programs   []string `json:"programs"`
	// Dev is the directory with the driver's device nodes. Empty means /dev.
	Dev string `json:"dev,omitempty"`
}

// String returns the view as JSON, which [Parse] reads.
func (v View) String() string {
	text, _ := json.Marshal(v) // A struct of strings cannot fail to marshal.
	return string(text)
}

// Parse reads the JSON that [View.String] wrote.
func Parse(text string) (View, error) {
	var v View
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return v, fmt.Errorf("parse the view: %w", err)
	}
	for _, path := range append([]string{v.Pipes, v.Logs, v.Shm, v.DriverRoot, v.LibraryDir}, v.Programs...) {
		if !filepath.IsAbs(path) {
			return v, fmt.Errorf("parse the view: %q is not an absolute path", path)
		}
	}
	if len(v.Programs) == 0 {
		return v, errors.New("parse the view: it names no program")
	}
	return v, nil
}

// Exec makes the mounts that v describes in a new mount namespace, and replaces this process with
// the first program in v.Programs. Exec returns only on failure. Then the caller must end the
// process, because some of the mounts may exist.
func Exec(v View, args, env []string) error {
	runtime.LockOSThread() // Only the locked thread enters the namespace and then becomes the program.
	if err := enter(v); err != nil {
		return fmt.Errorf("set up the mount namespace of the MPS daemon: %w", err)
	}
	name := filepath.Base(v.Programs[0])
	path := filepath.Join(programDir, name)
	if err := unix.Exec(path, append([]string{name}, args...), env); err != nil {
		return fmt.Errorf("run %s: %w", v.Programs[0], err)
	}
	return nil
}

func enter(v View) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("stop mounts from propagating out: %w", err)
	}
	if err := lockDown(); err != nil {
		return err
	}
	binds := []struct {
		from, to string
		flags    uintptr
		clients  bool // clients write to the directory, or make the driver's programs write to it
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
	// Open all sources before the first mount, because a mount may hide other sources.
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
	for _, dir := range []string{Pipes, Logs, driverRoot, programDir, libraryDir} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		// Mkdir may have reduced the mode by the umask. Set the full mode, because MPS servers run as the
		// users of their clients and must be able to enter the directory.
		if err := os.Chmod(dir, 0o755); err != nil {
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
		if err := unix.Mount("", b.to, "", unix.MS_BIND|unix.MS_REMOUNT|clientMountFlags, ""); err != nil {
			return fmt.Errorf("disable links in %s: %w", b.from, err)
		}
	}
	return linkDriverFiles(v)
}

// linkDriverFiles creates links to the driver's programs in /tmp/bin and to its libraries in
// /tmp/lib.
func linkDriverFiles(v View) error {
	for _, program := range v.Programs {
		target, err := resolve(v, program)
		if err != nil {
			return err
		}
		if err := os.Symlink(target, filepath.Join(programDir, filepath.Base(program))); err != nil {
			return err
		}
	}
	dir, err := resolve(v, v.LibraryDir)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the driver's libraries: %w", err)
	}
	for _, e := range entries {
		if !isDriverLibrary(e.Name()) {
			continue
		}
		target, err := resolve(v, filepath.Join(v.LibraryDir, e.Name()))
		if err != nil {
			continue // A dangling link is not a library.
		}
		if err := os.Symlink(target, filepath.Join(libraryDir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// isDriverLibrary reports whether name is the file name of one of the driver's libraries.
func isDriverLibrary(name string) bool {
	return (strings.HasPrefix(name, "libcuda") || strings.HasPrefix(name, "libnvidia-")) && strings.Contains(name, ".so")
}

// resolve follows the links of path as a process with the driver root as its root directory would.
// The result is a path in this mount namespace.
func resolve(v View, path string) (string, error) {
	relative, err := filepath.Rel(v.DriverRoot, path)
	if err != nil {
		return "", err
	}
	found, err := driverroot.Resolve(driverRoot, relative)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", path, err)
	}
	return found, nil
}
