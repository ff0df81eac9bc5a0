package hostfile

import (
	"io/fs"
	"syscall"
)

// DeviceNumber returns the major and minor number of a device node, as the kernel encodes them.
func DeviceNumber(info fs.FileInfo) uint64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Rdev
	}
	return 0
}
