package durable

import (
	"time"

	"golang.org/x/sys/unix"
)

// Stamp is another one whenever somebody has touched what has a name: a file, or the names in a directory. It is zero if nobody can tell.
type Stamp struct {
	device, inode uint64
	size          int64
	changed       unix.Timespec
}

// StampOf is the stamp of what has the name now.
func StampOf(path string) Stamp {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return Stamp{}
	}
	return Stamp{s.Dev, s.Ino, s.Size, s.Ctim}
}

// recent is more than the kernel's clock for the times of files takes for one step.
const recent = 2 * time.Second

// Settled says that what is read after the stamp was taken has another stamp when it changes. The kernel's clock for files has steps of some milliseconds: of
// what was touched a moment ago nobody can tell.
func (s Stamp) Settled(now time.Time) bool {
	return s != Stamp{} && now.Sub(time.Unix(s.changed.Unix())) >= recent
}
