package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// devScratch is the directory in which replaceDev assembles the new /dev before it moves it to
// /dev. Every image has this directory, and no program of the driver needs it.
const devScratch = "/tmp"

// standardNodes are the device nodes that programs expect in any /dev.
var standardNodes = []string{"null", "zero", "full", "random", "urandom", "tty"}

// replaceDev mounts a new /dev with the standard device nodes and the NVIDIA device nodes from
// driversDev, such as the /dev of a driver container. It adds none to the existing /dev, because
// that is the host's.
func replaceDev(driversDev string) error {
	nodes, err := filepath.Glob(filepath.Join(driversDev, "nvidia*"))
	if err != nil || len(nodes) == 0 {
		return fmt.Errorf("no device nodes of the driver in %s (--dev-root)", driversDev)
	}
	for _, name := range standardNodes {
		nodes = append(nodes, filepath.Join("/dev", name))
	}
	// Open all sources before mounting the tmpfs, because the tmpfs may hide them.
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
		return fmt.Errorf("move the new /dev into place: %w", err)
	}
	return nil
}

// bindNode bind-mounts source on target. source is a device node, or a directory of device nodes
// such as nvidia-caps.
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
	return clearAttributes(target, unix.MOUNT_ATTR_NODEV)
}
