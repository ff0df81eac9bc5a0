// Package below opens paths inside a root directory whose content is not trusted, and never outside
// of that root. Links resolve as for a process that has this root directory. All descriptors are
// O_PATH, so the package reads and writes nothing.
package below

import (
	"errors"

	"golang.org/x/sys/unix"
)

// attempts limits retries of openat2(2). The call fails with EAGAIN if anything on the node was
// renamed or mounted while the kernel followed "..".
const attempts = 1000

// Open opens a path below the directory descriptor root. It adds flags to O_PATH and O_CLOEXEC.
func Open(root int, path string, flags uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | flags, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for range attempts {
		fd, err = unix.Openat2(root, path, &how)
		if !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return fd, err
}
