package durable

import "github.com/gpu-dra-driver/gpu-dra-driver/pkg/joint"

// Together is a file system on which calls that wait for the same directory at the same time wait together. What was done before the call is on the disk after it,
// as without: a wait counts only for those who came before it began.
type Together struct {
	FS

	waits joint.Work[string]
}

// NewTogether has callers share what they wait for on the disk.
func NewTogether(disk FS) *Together { return &Together{FS: disk} }

var _ FS = &Together{}

// SyncDir is that of the file system below.
func (t *Together) SyncDir(dir string) error {
	return t.waits.Do(dir, func() error { return t.FS.SyncDir(dir) })
}
