package layout

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// reachFolder is the folder below /dev where the simulated NVML library finds the simulated node's
// files. Container runtimes scan the /dev of privileged containers for devices, but skip folders
// named .udev.
const reachFolder = ".udev/nvmlsim"

// ldconfig is where a usual host has it. Debian's /sbin is a link to /usr/sbin.
const ldconfig = "/usr/sbin/ldconfig"

// applyMounts bind-mounts the simulated /proc files over the machine's, so that code with absolute
// paths reads them, and the root folder below /dev. It hides ldconfig on a node without it. It
// removes mounts that the configuration no longer has. Call it in the node's own mount namespace.
func (c *Config) applyMounts(view) error {
	reach := filepath.Join(c.Dev, reachFolder)
	for _, m := range []struct {
		from, to string
		wanted   bool
	}{
		{c.path("proc", "driver"), "/proc/driver", c.MountProc},
		{c.path("proc", "devices"), "/proc/devices", c.MountProc},
		{c.root, reach, c.MountRoot},
		{os.DevNull, ldconfig, c.MountRoot && c.Node.NoLdconfig},
	} {
		mounted, err := isMountPoint(m.to)
		if err != nil {
			return err
		}
		switch {
		case m.wanted && !mounted:
			if m.to == reach {
				if err := os.MkdirAll(reach, 0o700); err != nil {
					return err
				}
			}
			if err := unix.Mount(m.from, m.to, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("bind %s over %s: %w", m.from, m.to, err)
			}
		case !m.wanted && mounted && c.mountedByUs(m.to, m.from):
			if err := unix.Unmount(m.to, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", m.to, err)
			}
			if m.to == reach {
				if err := os.Remove(reach); err != nil {
					return err
				}
				_ = os.Remove(filepath.Dir(reach)) // fails if the folder is not empty
			}
		}
	}
	return nil
}

// mountedByUs reports whether mountPoint and from are the same file, which means that this
// simulated node's bind mount is in place.
func (c *Config) mountedByUs(mountPoint, from string) bool {
	one, errOne := os.Stat(mountPoint)
	other, errOther := os.Stat(from)
	return errOne == nil && errOther == nil && os.SameFile(one, other)
}

func isMountPoint(path string) (bool, error) {
	file, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return false, err
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && fields[4] == path {
			return true, nil
		}
	}
	return false, lines.Err()
}
