// Package durable replaces and removes files so that a power cut leaves the old state or the new one, never a part and never neither.
//
// The order is the promise: the new content is on the disk before it gets the name, and the directory is on the disk before the caller goes on.
// [FS] is the small part of a file system that this takes, so that tests can end the world between any two of its calls.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// FS is what durable writes need of a file system.
type FS interface {
	// Create writes a new file and waits until its content is on the disk.
	Create(path string, data []byte) error
	Rename(from, to string) error
	Remove(path string) error
	// SyncDir waits until the directory's names are on the disk.
	SyncDir(dir string) error
	ReadFile(path string) ([]byte, error)
	// ReadDir lists names, in any order.
	ReadDir(dir string) ([]string, error)
}

// tmpPrefix marks files that have no name yet; readers of a directory skip them.
const tmpPrefix = ".tmp-"

var counter atomic.Uint64

// Replace gives path the content, whether or not it was there.
func Replace(disk FS, path string, data []byte) error {
	dir := filepath.Dir(path)
	tmp := filepath.Join(dir, fmt.Sprintf("%s%d-%d-%s", tmpPrefix, os.Getpid(), counter.Add(1), filepath.Base(path)))
	if len(filepath.Base(tmp)) > maxName {
		tmp = filepath.Join(dir, tmpPrefix+strconv.Itoa(os.Getpid())+"-"+strconv.FormatUint(counter.Add(1), 10))
	}
	if err := disk.Create(tmp, data); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreMissing(disk.Remove(tmp)))
	}
	if err := disk.Rename(tmp, path); err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), ignoreMissing(disk.Remove(tmp)))
	}
	if err := disk.SyncDir(dir); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// maxName is the longest file name that Linux file systems take, in bytes.
const maxName = 255

// Remove takes the name away for good. A file that is not there is removed already.
func Remove(disk FS, path string) error {
	if err := disk.Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("remove %s: %w", path, err)
	}
	if err := disk.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// IsTemporary says whether a directory entry is a file that Replace has not named yet.
func IsTemporary(name string) bool { return strings.HasPrefix(name, tmpPrefix) }

// Sweep removes what interrupted calls of Replace left in a directory. Files younger than age may belong to a call that is under way in another process.
func Sweep(dir string, age time.Duration) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look for unfinished files: %w", err)
	}
	var errs []error
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !IsTemporary(e.Name()) || time.Since(info.ModTime()) < age {
			continue
		}
		errs = append(errs, ignoreMissing(os.Remove(filepath.Join(dir, e.Name()))))
	}
	return errors.Join(errs...)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
