package nvidia

import (
	"io/fs"
	"syscall"
)

// deviceNumber is the number that a device node stands for.
func deviceNumber(info fs.FileInfo) uint64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Rdev
	}
	return 0
}
