package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What clients can write to is a small file system of its own, so that they can fill that and nothing else of the node. It holds for all clients of a daemon
// together.
const (
	// pipeSpace, in MiB, and files are far beyond some pipes, sockets and locks for each client.
	pipeSpace = 16
	// halfOfMemory is what tmpfs itself defaults to, written out because an empty size would be no
	// space at all.
	halfOfMemory = "50%"
	pipeFiles    = 1 << 14
	shmFiles     = 1 << 16
)

// space is what a directory has room for. None at all is no limit: the directory is an ordinary one, which no client sees.
type space struct {
	size  string // as tmpfs(5) has it
	files int
}

// mebibytes are a size.
func mebibytes(n uint64) string { return fmt.Sprintf("%dm", n) }

// bound makes the directory, which is there, a file system of this size, unless it is one already or holds something: it would be hidden from those who use it.
func (s space) bound(path string) error {
	if s.size == "" {
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
	data := fmt.Sprintf("size=%s,nr_inodes=%d,mode=1777", s.size, s.files)
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

// removeBoth removes what is in a directory on which nothing is mounted any more, and the directory.
func removeBoth(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(path, e.Name())); err != nil {
			return err
		}
	}
	return removeMountpoint(path)
}

// removeMountpoint removes a directory on which nothing is mounted any more that can be seen here. There may be copies that cannot: a container that has the
// node's /dev has those of what was mounted below it when the container was made, whatever has been mounted over them since. A directory is busy for a process
// in whose mount namespace something is mounted on it, and for no other: the kernel takes the mounts of all others away with it.
func removeMountpoint(path string) error {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	parent, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	defer func() { _ = unix.Close(parent) }()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // Never unlocked: the thread, and its mount namespace, end with this goroutine.
		done <- removeFromBare(parent, path)
	}()
	return <-done
}

// removeFromBare gives the thread a mount namespace with nothing but its root, and removes the directory from there.
func removeFromBare(parent int, path string) error {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return &fs.PathError{Op: "leave the mount namespace to remove", Path: path, Err: err}
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &fs.PathError{Op: "leave the mount namespace to remove", Path: path, Err: err}
	}
	lines := strings.Split(strings.TrimSpace(string(mounts)), "\n")
	for _, line := range slices.Backward(lines) { // what was mounted last covers what was before
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] != "/" {
			_ = unix.Unmount(fields[4], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // One that stays is told by what follows.
		}
	}
	if err := unix.Unlinkat(parent, filepath.Base(path), unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}
