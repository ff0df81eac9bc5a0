package durable

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// UntrustedError says that someone else than the user of this process can have written a file, or can change what is in a directory. What the driver does with a
// record it does as root: it believes only what root alone could write.
type UntrustedError struct {
	Path   string
	Reason string
}

func (e *UntrustedError) Error() string {
	return fmt.Sprintf("%s is not believed, because %s: if nobody but root has written it, give it to root (chown 0:0) and take the right to write from others (chmod go-w), else remove it", e.Path, e.Reason)
}

// CheckDir makes sure that path is a directory, not a link to one, that belongs to the user of this process and that nobody else can write to. The error is an
// [*UntrustedError] or says that nothing is there.
func CheckDir(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return trustedDir(path, info)
}

// CheckFile makes sure of the same for a file. What it is asked of is run by root, or read as what root has said.
func CheckFile(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return trustedFile(path, info)
}

func trustedDir(path string, info fs.FileInfo) error {
	if !info.IsDir() {
		return &UntrustedError{path, "it is no directory but " + kind(info.Mode())}
	}
	return owned(path, info)
}

func trustedFile(path string, info fs.FileInfo) error {
	if !info.Mode().IsRegular() {
		return &UntrustedError{path, "it is no file but " + kind(info.Mode())}
	}
	return owned(path, info)
}

// owned looks at owner and rights. The group of the process may write: on a node that is root's own.
func owned(path string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return &UntrustedError{path, "its owner is not known"}
	}
	switch mode := info.Mode().Perm(); {
	case int(stat.Uid) != os.Geteuid():
		return &UntrustedError{path, fmt.Sprintf("it belongs to user %d and not to %d", stat.Uid, os.Geteuid())}
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
