package durable

import (
	"time"

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

// recent is longer than the kernel's step between two file times.
const recent = 2 * time.Second

// Settled reports whether every later change of the file will change its stamp. File times have
// steps of some milliseconds, so a second change within the same step leaves the stamp equal.
func (s Stamp) Settled(now time.Time) bool {
	return s != Stamp{} && now.Sub(time.Unix(s.changed.Unix())) >= recent
}
