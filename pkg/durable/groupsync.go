package durable

import "github.com/gpu-dra-driver/gpu-dra-driver/pkg/coalesce"

// GroupSync is a file system in which concurrent syncs of one directory share a single sync. A call
// waits for a sync that began after the call, so its changes are on disk when it returns.
type GroupSync struct {
	FS

	syncs coalesce.Group[string]
}

// NewGroupSync returns a GroupSync that uses disk.
func NewGroupSync(disk FS) *GroupSync { return &GroupSync{FS: disk} }

var _ FS = &GroupSync{}

// SyncDir syncs the directory in the wrapped file system. Concurrent calls share one sync.
func (t *GroupSync) SyncDir(dir string) error {
	return t.syncs.Do(dir, func() error { return t.FS.SyncDir(dir) })
}
