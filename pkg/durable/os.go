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
	f, err := createNew(path)
	if errors.Is(err, fs.ErrExist) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err = createNew(path)
	}
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

func createNew(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
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
	d, err := open(dir, syscall.O_DIRECTORY)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (OS) ReadFile(path string) ([]byte, error) {
	// If path is a pipe, opening it without O_NONBLOCK would wait for a writer.
	f, err := open(path, syscall.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := trustedFile(path, info); err != nil {
		return nil, err
	}
	if info.Size() > maxSize {
		return nil, &UntrustedError{path, fmt.Sprintf("it has %d bytes, which is more than this driver ever writes", info.Size())}
	}
	return io.ReadAll(io.LimitReader(f, maxSize))
}

func (OS) ReadDir(dir string) ([]string, error) {
	d, err := open(dir, syscall.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	info, err := d.Stat()
	if err != nil {
		return nil, err
	}
	if err := trustedDir(dir, info); err != nil {
		return nil, err
	}
	return d.Readdirnames(-1)
}

// open opens a file for reading. If the last element of path is a symlink, it returns an
// [*UntrustedError].
func open(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|flags, 0)
	if err == nil {
		return f, nil
	}
	if info, lerr := os.Lstat(path); lerr == nil && info.Mode()&fs.ModeSymlink != 0 {
		return nil, &UntrustedError{path, "it is " + kind(info.Mode())}
	}
	return nil, err
}
