package namespace

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// harmless is how the directories are mounted in which clients can put what they like. An older kernel passes over the flag against links.
const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW

// kernels are the places in /proc by which root can change the node; the rest of it is about processes.
var kernels = []string{"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs"}

// lockDown makes all that can be seen read-only and without devices, but for /dev, where the driver's are, and for processes' own files in /proc. The programs
// need to write to what is mounted afterwards, and to nothing else.
func lockDown() error {
	if err := unix.Mount("/dev", "/dev", "", unix.MS_BIND|unix.MS_REC, ""); err != nil { // it may be no mount of its own
		return fmt.Errorf("bind /dev: %w", err)
	}
	for _, path := range kernels {
		if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("bind %s: %w", path, err)
		}
	}
	all := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID}
	err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &all)
	if errors.Is(err, unix.ENOSYS) {
		return nil // Linux before 5.12
	}
	if err != nil {
		return fmt.Errorf("make what is the node's read-only: %w", err)
	}
	return errors.Join(allow("/dev", unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV), allow("/proc", unix.MOUNT_ATTR_RDONLY))
}

// allow takes back what lockDown has set.
func allow(path string, attributes uint64) error {
	err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_clr: attributes})
	if err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("let %s be used: %w", path, err)
	}
	return nil
}
