package namespace

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// clientMountFlags are the mount flags of directories that MPS clients can write to. A kernel
// before 5.10 ignores MS_NOSYMFOLLOW.
const clientMountFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW

// writableProcPaths are the parts of /proc through which root can change the node. lockDown makes
// them read-only. The rest of /proc describes processes and stays writable.
var writableProcPaths = []string{"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs"}

// lockDown makes every mount of the namespace read-only and forbids device nodes there. It leaves
// out two mounts: /dev with the driver's device nodes, and /proc except writableProcPaths.
// Directories to which the driver's programs write are mounted afterwards.
func lockDown() error {
	// Bind /dev to itself, because it may not be a mount yet.
	if err := unix.Mount("/dev", "/dev", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind /dev: %w", err)
	}
	for _, path := range writableProcPaths {
		if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("bind %s: %w", path, err)
		}
	}
	all := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID}
	err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &all)
	if errors.Is(err, unix.ENOSYS) {
		return nil // Linux before 5.12 lacks mount_setattr(2).
	}
	if err != nil {
		return fmt.Errorf("make the node's file systems read-only: %w", err)
	}
	return errors.Join(clearAttributes("/dev", unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV), clearAttributes("/proc", unix.MOUNT_ATTR_RDONLY))
}

// clearAttributes removes these mount attributes, which lockDown has set, from the mount at path.
func clearAttributes(path string, attributes uint64) error {
	err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_clr: attributes})
	if err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("clear mount attributes of %s: %w", path, err)
	}
	return nil
}
