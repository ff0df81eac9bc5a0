package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/thread"
)

// Directories that clients can write to are small file systems of their own, so that clients cannot
// fill the node's file systems. A size limits all clients of a daemon together.
const (
	// pipeMebibytes is the size of a pipe directory. The pipes, sockets and locks of all clients need
	// far less.
	pipeMebibytes = 16
	// halfOfMemory is tmpfs's default size. It is explicit because an empty quota.size means no limit.
	halfOfMemory = "50%"
	pipeFiles    = 1 << 14
	shmFiles     = 1 << 16
)

// quota limits the file system that is mounted on a directory, in bytes and in number of files. The
// zero value mounts no file system, which is right for directories that clients do not see.
type quota struct {
	size  string // in the format of tmpfs(5)
	files int
}

// mebibytes returns n MiB in the format of tmpfs(5).
func mebibytes(n uint64) string { return fmt.Sprintf("%dm", n) }

// mount mounts a tmpfs of this size on the existing directory path. It does nothing if a file
// system is already mounted there.
func (q quota) mount(path string) error {
	if q.size == "" {
		return nil
	}
	is, err := mounted(path)
	if err != nil || is {
		return err
	}
	data := fmt.Sprintf("size=%s,nr_inodes=%d,mode=1777", q.size, q.files)
	if err := unix.Mount("gpu-mps", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		return fmt.Errorf("limit the size of %s: mount a tmpfs: %w", path, err)
	}
	return nil
}

// mounted reports whether path is on another file system than its parent directory.
func mounted(path string) (bool, error) {
	var devices [2]uint64
	for i, p := range []string{path, filepath.Dir(path)} {
		info, err := os.Lstat(p)
		if err != nil {
			return false, err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return false, &fs.PathError{Op: "get the file system of", Path: p, Err: errors.ErrUnsupported}
		}
		devices[i] = stat.Dev
	}
	return devices[0] != devices[1], nil
}

// unmountAll unmounts every file system that is mounted on path. A container that has mounted one
// of them keeps it until the container ends.
func unmountAll(path string) error {
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

// removeUnmounted removes the directory path, on which nothing is mounted any more. Another path,
// such as the driver root if that is the host's /, may still show the mount. The kernel refuses the
// removal in every mount namespace that does, so removeUnmounted retries in one without mounts.
func removeUnmounted(path string) error {
	err := os.RemoveAll(path)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	parent, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	defer func() { _ = unix.Close(parent) }()
	thread.OnSpare(func() { err = removeFromBare(parent, path) })
	return err
}

// removeFromBare moves its thread to a new mount namespace and unmounts everything there but the
// root. Then it removes the directory path. parent is a descriptor of the directory's parent.
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
	for _, line := range slices.Backward(lines) { // Unmount the last mount first, because later mounts cover earlier ones.
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] != "/" {
			// The result does not matter, because Unlinkat below fails if the mount is still there.
			_ = unix.Unmount(fields[4], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}
	if err := unix.Unlinkat(parent, filepath.Base(path), unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}
