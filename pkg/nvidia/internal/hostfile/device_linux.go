package hostfile

import (
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// DeviceNumber returns the major and minor number of a device node, as the kernel encodes them.
func DeviceNumber(info fs.FileInfo) uint64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Rdev
	}
	return 0
}

// CharDevice returns the number of the character device at path. It follows symlinks. It never
// asks a file server, which may be down: the kernel knows the type and number of an open file.
func CharDevice(path string) (number uint64, is bool) {
	var s unix.Statx_t
	const cached = unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
	if err := unix.Statx(unix.AT_FDCWD, path, cached, unix.STATX_TYPE, &s); err != nil || s.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, false
	}
	return unix.Mkdev(s.Rdev_major, s.Rdev_minor), true
}
