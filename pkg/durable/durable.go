// Package durable replaces and removes files so that after a power cut either the old or the new
// state is on disk, never a part.
//
// A file's content is on disk before the file gets its name, and the directory is on disk before
// the call returns. Files are trusted only if no other user than this process's (root on a node)
// can have written them: see [UntrustedError].
//
// [BootID] tells whether the node was rebooted. [FS] is the part of a file system that this package
// needs, so that tests can simulate a crash between any two of its calls.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
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
