// Package durable replaces and removes files so that a power cut leaves the old state or the new one, never a part and never neither.
//
// The order is the promise: the new content is on the disk before it gets the name, and the directory is on the disk before the caller goes on.
// What is read is believed only if nobody but the user of this process, root on a node, can have written it: see [UntrustedError].
//
// What a power cut takes away for certain is told by [BootID].
//
// [FS] is the small part of a file system that this takes, so that tests can end the world between any two of its calls.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
)

// FS is what durable writes need of a file system.
type FS interface {
	// Create writes a file, over one that is there, and waits until its content is on the disk.
	Create(path string, data []byte) error
	// MkdirAll makes a directory and its parents; one that is there is fine.
	MkdirAll(dir string) error
	Rename(from, to string) error
	Remove(path string) error
	// SyncDir waits until the directory's names are on the disk.
	SyncDir(dir string) error
	ReadFile(path string) ([]byte, error)
	// ReadDir lists names, in any order.
	ReadDir(dir string) ([]string, error)
	// Hold keeps what has the name now from being freed when it loses the name, until the caller lets go: to free what was on the disk takes a file system
	// longer than all else of a removal (1.1 ms of 1.4 on an ext4 that tells the device of it at once), and nobody needs to wait for that.
	Hold(path string) (letGo func())
}

// tmpPrefix marks files that have no name yet; readers of a directory skip them.
const tmpPrefix = ".tmp-"

// maxName is the longest file name that Linux file systems take, in bytes.
const maxName = 255

// Replace gives path the content, whether or not it was there. Only one call for a path may run at a time, in all processes: its temporary file has a
// fixed name, so that what a killed call left is overwritten by the next one and can be found by [Unfinished].
func Replace(disk FS, path string, data []byte) error {
	dir, base := filepath.Split(path)
	tmp := filepath.Join(dir, temporary(base))
	defer disk.Hold(path)()
	err := disk.Create(tmp, data)
	if err == nil {
		err = disk.Rename(tmp, path)
	}
	if err != nil {
		_ = disk.Remove(tmp) // A file that stays is overwritten by the next call.
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := disk.SyncDir(filepath.Clean(dir)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func temporary(base string) string {
	name := tmpPrefix + base
	return name[:min(len(name), maxName)]
}

// Unfinished says whether a directory entry is the temporary file of an interrupted [Replace], and of which name: all of it, or its beginning where the
// name is almost as long as a name can be.
func Unfinished(entry string) (base string, is bool) { return strings.CutPrefix(entry, tmpPrefix) }

// Remove takes the name away for good. A file that is not there is removed already.
func Remove(disk FS, path string) error {
	defer disk.Hold(path)()
	if err := disk.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	// Also where it was gone already: the call that removed it may have been killed before this.
	if err := disk.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// MakeDir makes a directory below one that is there already, for good: without its name on the disk, what is in it would be lost with it.
func MakeDir(disk FS, dir string) error {
	if err := disk.MkdirAll(dir); err != nil {
		return fmt.Errorf("create the directory %s: %w", dir, err)
	}
	if err := disk.SyncDir(filepath.Dir(dir)); err != nil {
		return fmt.Errorf("create the directory %s: %w", dir, err)
	}
	return nil
}
