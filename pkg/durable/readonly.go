package durable

import (
	"io/fs"
	"syscall"
)

// ReadOnly is [OS] for a process that must not change files. MkdirAll only checks that the
// directory exists, and SyncDir does nothing.
type ReadOnly struct{ OS }

var _ FS = ReadOnly{}

func (ReadOnly) MkdirAll(dir string) error          { return CheckDir(dir) }
func (ReadOnly) SyncDir(string) error               { return nil }
func (ReadOnly) Create(path string, _ []byte) error { return readOnly("create", path) }
func (ReadOnly) Rename(from, _ string) error        { return readOnly("rename", from) }
func (ReadOnly) Remove(path string) error           { return readOnly("remove", path) }
func readOnly(operation, path string) *fs.PathError {
	return &fs.PathError{Op: operation, Path: path, Err: syscall.EROFS}
}
