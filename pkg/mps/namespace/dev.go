package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// devScratch is where the new /dev is put together: a directory that every image has and no program of the driver's needs.
const devScratch = "/tmp"

// standardNodes are what programs expect in any /dev.
var standardNodes = []string{"null", "zero", "full", "random", "urandom", "tty"}

// replaceDev puts a /dev in place that has the standard nodes and those of the driver, which are in another directory: a driver container's own /dev.
// Device nodes cannot be added to /dev itself, which is the host's.
func replaceDev(driversDev string) error {
	nodes, err := filepath.Glob(filepath.Join(driversDev, "nvidia*"))
	if err != nil || len(nodes) == 0 {
		return fmt.Errorf("there are no device nodes of the driver in %s (--dev-root)", driversDev)
	}
	for _, name := range standardNodes {
		nodes = append(nodes, filepath.Join("/dev", name))
	}
	// The sources are opened before the tmpfs, which may hide them.
	var sources []*os.File
	for _, node := range nodes {
		f, err := os.OpenFile(node, unix.O_PATH, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", node, err)
		}
		defer func() { _ = f.Close() }()
		sources = append(sources, f)
	}
	if err := unix.Mount("gpu-mps", devScratch, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755,size=64k"); err != nil {
		return fmt.Errorf("mount a tmpfs for /dev: %w", err)
	}
	if err := os.Mkdir(filepath.Join(devScratch, "shm"), 0o755); err != nil {
		return err
	}
	for _, source := range sources {
		if err := bindNode(source, filepath.Join(devScratch, filepath.Base(source.Name()))); err != nil {
			return err
		}
	}
	if err := unix.Mount(devScratch, "/dev", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("put a new /dev in place: %w", err)
	}
	return nil
}

// bindNode binds a device node, or a directory of some (nvidia-caps).
func bindNode(source *os.File, target string) error {
	info, err := source.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.Mkdir(target, 0o755)
	} else {
		err = os.WriteFile(target, nil, 0o600)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", source.Fd()), target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", source.Name(), err)
	}
	return allow(target, unix.MOUNT_ATTR_NODEV)
}
