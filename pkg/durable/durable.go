// Package durable replaces and removes files so that after a power cut either the old or the new
// state is on disk, never a part.
//
// A file's content is on disk before the file gets its name, and the directory is on disk before
// the call returns. Files are trusted only if no other user than this process's (root on a node)
// can have written them: see [UntrustedError]. [OpenRegular] is for files that others write: it
// never waits for the writer of a pipe.
//
// [BootID] tells whether the node was rebooted. [FS] is the part of a file system that this package
// needs, so that tests can simulate a crash between any two of its calls.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// FS is the part of a file system that this package uses.
type FS interface {
	// Create creates or replaces a file, and waits until its content is on disk.
	Create(path string, data []byte) error
	// MkdirAll creates a directory and its parents. If the directory exists, it succeeds.
	MkdirAll(dir string) error
	Rename(from, to string) error
	Remove(path string) error
	// SyncDir waits until the names in the directory are on disk.
	SyncDir(dir string) error
	ReadFile(path string) ([]byte, error)
	// ReadDir returns the names in a directory, in any order.
	ReadDir(dir string) ([]string, error)
}

// tmpPrefix is the prefix of temporary files. Readers of a directory skip them.
const tmpPrefix = ".tmp-"

// maxName is the longest file name on Linux, in bytes.
const maxName = 255

// Replace gives the file at path this content, whether or not the file exists. Only one call for a
// path may run at a time, in all processes. The temporary file has a fixed name. So the next call
// overwrites the file that a killed call left, and [Unfinished] recognizes it.
func Replace(disk FS, path string, data []byte) error {
	dir, base := filepath.Split(path)
	name := tmpPrefix + base
	tmp := filepath.Join(dir, name[:min(len(name), maxName)])
	err := disk.Create(tmp, data)
	if err == nil {
		err = disk.Rename(tmp, path)
	}
	if err != nil {
		_ = disk.Remove(tmp) // the next call overwrites a leftover
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := disk.SyncDir(filepath.Clean(dir)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// ReplaceUnsynced gives the file at path this content, so that a reader sees the old file or the
// new one. Everybody may read the file. It is for files that need not survive a power cut. Only one
// call for a temporary file may run at a time.
func ReplaceUnsynced(path, temporary string, data []byte) error {
	f, err := createNew(temporary)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		_ = os.Remove(temporary)
	}
	return err
}

// Unfinished reports whether a name in a directory is that of the temporary file of an interrupted
// [Replace]. base is the name of the file to replace, or only its beginning if that name is almost
// as long as maxName.
func Unfinished(entry string) (base string, is bool) { return strings.CutPrefix(entry, tmpPrefix) }

// Remove removes the file at path and waits until the removal is on disk. If the file is missing,
// it succeeds.
func Remove(disk FS, path string) error {
	if err := disk.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	// Sync even if the file was missing: the process that removed it may have been killed before the
	// sync.
	if err := disk.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// MakeDir creates a directory in an existing one and waits until its name is on disk. Without the
// name, the files in the directory would be lost in a power cut.
func MakeDir(disk FS, dir string) error {
	if err := disk.MkdirAll(dir); err != nil {
		return fmt.Errorf("create the directory %s: %w", dir, err)
	}
	if err := disk.SyncDir(filepath.Dir(dir)); err != nil {
		return fmt.Errorf("create the directory %s: %w", dir, err)
	}
	return nil
}

// maxSize is the largest file that this package reads. The driver's files are far smaller.
const maxSize = 16 << 20

// OS is the real file system. It does not follow a symlink in the last element of a path. It reads
// a file or directory only if no other user than this process's can have written to it: see
// [UntrustedError].
type OS struct{}

var _ FS = OS{}

// createNew creates the file at path. It never opens an existing file, which may be a planted
// symlink, or another process may have it open. It removes such a file, such as a killed call left.
func createNew(path string) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	f, err := os.OpenFile(path, flags, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		f, err = os.OpenFile(path, flags, 0o600)
	}
	return f, err
}

// Create implements [FS].
func (OS) Create(path string, data []byte) error {
	f, err := createNew(path)
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
	f, info, err := openNow(path, syscall.O_NOFOLLOW)
	switch {
	case errors.Is(err, syscall.ELOOP):
		return nil, nil, &UntrustedError{path, "it is a symbolic link"}
	case errors.Is(err, syscall.ENXIO):
		return nil, nil, &UntrustedError{path, "it is " + kind(fs.ModeSocket)}
	case err != nil:
		return nil, nil, err
	}
	if err := checkTrusted(path, info, want); err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// openNow opens a file for reading. If path is a pipe, opening it without O_NONBLOCK would wait for
// a writer. The error of a socket is ENXIO.
func openNow(path string, flags int) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|flags, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// OpenRegular opens a file for reading that others may write. It follows symlinks. It returns an
// error if path is no file.
func OpenRegular(path string) (*os.File, error) {
	f, info, err := openNow(path, 0)
	if errors.Is(err, syscall.ENXIO) {
		return nil, &fs.PathError{Op: "open", Path: path, Err: errors.New("it is " + kind(fs.ModeSocket))}
	}
	if err == nil && !info.Mode().IsRegular() {
		err = errors.Join(&fs.PathError{Op: "open", Path: path, Err: errors.New("it is " + kind(info.Mode()))}, f.Close())
	}
	if err != nil {
		return nil, err
	}
	return f, nil
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
func CheckDir(path string) error { return check(path, fs.ModeDir) }

// CheckFile checks a file as [CheckDir] checks a directory. It is for files that root runs or whose
// content root acts on.
func CheckFile(path string) error { return check(path, 0) }

func check(path string, want fs.FileMode) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return checkTrusted(path, info, want)
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
