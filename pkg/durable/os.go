package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// maxSize is the largest file that ReadFile reads. Files of this package are far smaller.
const maxSize = 16 << 20

// OS is the real file system. It does not follow a symlink in the last element of a path. It reads
// a file or directory only if no other user than this process's can have written to it: see
// [UntrustedError].
type OS struct{}

var _ FS = OS{}

// Create never writes to an existing file, because it may be a planted symlink, or another process
// may have it open. It removes such a file first.
func (OS) Create(path string, data []byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(data); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (OS) MkdirAll(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return CheckDir(dir)
}

func (OS) Rename(from, to string) error { return os.Rename(from, to) }
func (OS) Remove(path string) error     { return os.Remove(path) }

func (OS) SyncDir(dir string) error {
	d, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (OS) ReadFile(path string) ([]byte, error) {
	f, info, err := open(path, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if info.Size() > maxSize {
		return nil, &UntrustedError{path, fmt.Sprintf("it has %d bytes, which is more than this driver ever writes", info.Size())}
	}
	return io.ReadAll(io.LimitReader(f, maxSize))
}

func (OS) ReadDir(dir string) ([]string, error) {
	d, _, err := open(dir, fs.ModeDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	return d.Readdirnames(-1)
}

// open opens a trusted file or directory for reading. want is fs.ModeDir for a directory, else 0.
func open(path string, want fs.FileMode) (*os.File, fs.FileInfo, error) {
	// If path is a pipe, opening it without O_NONBLOCK would wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		return nil, nil, &UntrustedError{path, "it is a symbolic link"}
	}
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = checkTrusted(path, info, want)
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// UntrustedError says that another user can have written a file, or can change a directory. The
// driver runs as root and acts on its files, so it trusts only those that root alone can write.
type UntrustedError struct {
	Path   string
	Reason string
}

func (e *UntrustedError) Error() string {
	return fmt.Sprintf("refusing %s, because %s: "+
		"if only root has written it, give it to root (chown 0:0) and revoke write permission (chmod go-w), otherwise remove it",
		e.Path, e.Reason)
}

// CheckDir checks that path is a directory and no symlink, belongs to this process's user, and is
// writable by no other user. If not, it returns an [*UntrustedError]. If path is missing, it
// returns the file system's error.
func CheckDir(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return checkTrusted(path, info, fs.ModeDir)
}

// CheckFile checks a file as [CheckDir] checks a directory. It is for files that root runs or whose
// content root acts on.
func CheckFile(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return checkTrusted(path, info, 0)
}

// checkTrusted returns an [*UntrustedError] unless path is of the wanted type, belongs to this
// process's user, and no other user may write to it. Its group may write if it is this process's
// group, because on a node that is root's group.
func checkTrusted(path string, info fs.FileInfo, want fs.FileMode) error {
	mode, perm := info.Mode(), info.Mode().Perm()
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case mode.Type() != want:
		return &UntrustedError{path, "it is " + kind(mode)}
	case !ok:
		return &UntrustedError{path, "its owner is unknown"}
	case int(stat.Uid) != os.Geteuid():
		return &UntrustedError{path, fmt.Sprintf("it belongs to user %d, not to %d", stat.Uid, os.Geteuid())}
	case perm&0o002 != 0, perm&0o020 != 0 && int(stat.Gid) != os.Getegid():
		return &UntrustedError{path, fmt.Sprintf("others may write to it (mode %04o, group %d)", perm, stat.Gid)}
	}
	return nil
}

func kind(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return "a file"
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeSymlink != 0:
		return "a symbolic link"
	}
	return "a device, pipe or socket (" + mode.Type().String() + ")"
}
