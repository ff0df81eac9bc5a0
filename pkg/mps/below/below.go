// Package below finds paths in a root directory that somebody else fills, as whoever has that root would, and never out of it. It opens them as places only;
// it reads and writes nothing.
package below

import (
	"errors"

	"golang.org/x/sys/unix"
)

// attempts is how often a path is looked for while the kernel cannot say for sure where it leads: each time something was renamed or mounted, anywhere on the
// node, while ".." was followed; see openat2(2).
const attempts = 1000

// Open opens a path below a root (O_PATH), with these flags beside.
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
