package durable

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

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
	return trustedDir(path, info)
}

// CheckFile checks a file as [CheckDir] checks a directory. It is for files that root runs or whose
// content root acts on.
func CheckFile(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return trustedFile(path, info)
}

func trustedDir(path string, info fs.FileInfo) error {
	if !info.IsDir() {
		return &UntrustedError{path, "it is not a directory but " + kind(info.Mode())}
	}
	return owned(path, info)
}

func trustedFile(path string, info fs.FileInfo) error {
	if !info.Mode().IsRegular() {
		return &UntrustedError{path, "it is not a file but " + kind(info.Mode())}
	}
	return owned(path, info)
}

// owned returns an [*UntrustedError] unless the file or directory belongs to this process's user
// and no other user may write to it. Its group may write if it is this process's group, because on
// a node that is root's group.
func owned(path string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return &UntrustedError{path, "its owner is unknown"}
	}
	switch mode := info.Mode().Perm(); {
	case int(stat.Uid) != os.Geteuid():
		return &UntrustedError{path, fmt.Sprintf("it belongs to user %d, not to %d", stat.Uid, os.Geteuid())}
	case mode&0o002 != 0, mode&0o020 != 0 && int(stat.Gid) != os.Getegid():
		return &UntrustedError{path, fmt.Sprintf("others may write to it (mode %04o, group %d)", mode, stat.Gid)}
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
