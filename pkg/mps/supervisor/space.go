package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// DefaultSharedMemory is in MiB: many times what a container has for /dev/shm without MPS (64 MiB), because its programs may use it for more than MPS.
const DefaultSharedMemory = 1024

// What clients can write to is a small file system of its own, so that they can fill that and nothing else of the node. It holds for all clients of a daemon
// together.
const (
	// pipeSpace, in MiB, and files are far beyond some pipes, sockets and locks for each client.
	pipeSpace = 16
	pipeFiles = 1 << 14
	shmFiles  = 1 << 16
)

// space is what a directory has room for. None at all is no limit: the directory is an ordinary one, which no client sees.
type space struct {
	mebibytes uint64
	files     int
}

// bound makes the directory, which is there, a file system of this size, unless it is one already or holds something: it would be hidden from those who use it.
func (s space) bound(path string) error {
	if s.mebibytes == 0 {
		return nil
	}
	is, err := mounted(path)
	if err != nil || is {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil || len(entries) > 0 {
		return err
	}
	data := fmt.Sprintf("size=%dm,nr_inodes=%d,mode=1777", s.mebibytes, s.files)
	if err := unix.Mount("gpu-mps", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		return fmt.Errorf("give %s a bounded space: mount a tmpfs: %w", path, err)
	}
	return nil
}

// mounted says whether a directory is another file system than its parent.
func mounted(path string) (bool, error) {
	var devices [2]uint64
	for i, p := range []string{path, filepath.Dir(path)} {
		info, err := os.Lstat(p)
		if err != nil {
			return false, err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return false, &fs.PathError{Op: "look at the file system of", Path: p, Err: errors.ErrUnsupported}
		}
		devices[i] = stat.Dev
	}
	return devices[0] != devices[1], nil
}

// unbound takes the file system away. Containers that still have it keep it until they end.
func unbound(path string) error {
	for {
		is, err := mounted(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !is {
			return err
		}
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &fs.PathError{Op: "unmount", Path: path, Err: err}
		}
	}
}
