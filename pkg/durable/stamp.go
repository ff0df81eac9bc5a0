package durable

import (
	"golang.org/x/sys/unix"
)

// Stamp changes whenever a file's content, or a directory's list of names, changes. It is zero if
// the file or directory cannot be read.
type Stamp struct {
	device, inode uint64
	size          int64
	changed       unix.Timespec
}

// StampOf returns the stamp of the file or directory at path.
func StampOf(path string) Stamp {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return Stamp{}
	}
	return Stamp{s.Dev, s.Ino, s.Size, s.Ctim}
}
