// Package durabletest fakes a disk in memory. A test can make it crash at any write. A process that
// is killed loses nothing that it has written. A power cut loses every name in a directory that was
// not synced.
package durabletest

import (
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// ErrStopped is the error of every call after the simulated crash.
var ErrStopped = errors.New("the process is dead")

// Disk is a fake disk in memory. Its zero value is not usable: see [New].
type Disk struct {
	mu      sync.Mutex
	visible map[string][]byte
	synced  map[string][]byte
	dirs    map[string]bool

	writes  int
	stopAt  int
	failAt  int
	failure error
	stopped bool
	full    bool
	// unread has the errors with which reads fail, by path.
	unread map[string]error
}

var _ durable.FS = &Disk{}

// New returns an empty fake disk that works until a test sets a fault.
func New() *Disk {
	return &Disk{visible: map[string][]byte{}, synced: map[string][]byte{}, dirs: map[string]bool{}, unread: map[string]error{}}
}

// StopAt lets the disk crash at the n-th write from now on, counted from 1.
func (d *Disk) StopAt(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes, d.stopAt = 0, n
}

// FailAt lets only the n-th write from now on fail, with err.
func (d *Disk) FailAt(n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes, d.failAt, d.failure = 0, n, err
}

// Fill lets each Create fail from now on, as on a full disk. It leaves a part of the file, too.
func (d *Disk) Fill() { d.setFull(true) }

// Free ends what [Disk.Fill] began.
func (d *Disk) Free() { d.setFull(false) }

func (d *Disk) setFull(full bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.full = full
}

// FailReads lets each read of the file fail with err from now on. If err is nil, it ends that.
func (d *Disk) FailReads(path string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unread[path] = err
}

// Stopped reports whether the crash that StopAt sets has happened.
func (d *Disk) Stopped() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stopped
}

// Writes returns the number of writes since the last StopAt or FailAt.
func (d *Disk) Writes() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.writes
}

// Restart ends the crash: the disk works again, with all files that were written. It simulates a
// new process.
func (d *Disk) Restart() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopped, d.stopAt, d.failAt = false, 0, 0
}

// PowerCut drops the names that were not synced, and then works like Restart.
func (d *Disk) PowerCut() {
	d.mu.Lock()
	d.visible = maps.Clone(d.synced)
	d.mu.Unlock()
	d.Restart()
}

// PowerCutKeeping is PowerCut, but keeps the unsynced names in the directories for which written is
// true. A file system may have written them by itself.
func (d *Disk) PowerCutKeeping(written func(dir string) bool) {
	d.mu.Lock()
	kept := map[string]bool{}
	for _, dir := range slices.Sorted(maps.Keys(d.dirs)) {
		kept[dir] = written(dir)
	}
	after := map[string][]byte{}
	for path, data := range d.synced {
		if !kept[filepath.Dir(path)] {
			after[path] = data
		}
	}
	for path, data := range d.visible {
		if kept[filepath.Dir(path)] {
			after[path] = data
		}
	}
	d.visible, d.synced = after, maps.Clone(after)
	d.mu.Unlock()
	d.Restart()
}

// Clone returns a copy of the disk that works, with the same files.
func (d *Disk) Clone() *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &Disk{visible: maps.Clone(d.visible), synced: maps.Clone(d.synced), dirs: maps.Clone(d.dirs), unread: map[string]error{}}
}

// State returns the content of every file: visible as a process sees it, and synced as it would be
// after a power cut.
func (d *Disk) State() (visible, synced map[string][]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.visible), maps.Clone(d.synced)
}

// Write counts as one write and fails if a fault is due. Tests call it where the tested process
// changes something other than this disk.
func (d *Disk) Write() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.write()
}

func (d *Disk) write() error {
	if d.stopped {
		return ErrStopped
	}
	d.writes++
	switch d.writes {
	case d.stopAt:
		d.stopped = true
		return ErrStopped
	case d.failAt:
		return d.failure
	}
	return nil
}

// Names returns the names of the files in a directory, as a process sees them.
func (d *Disk) Names(dir string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for path := range d.visible {
		if filepath.Dir(path) == dir {
			names = append(names, filepath.Base(path))
		}
	}
	return names
}

// Put adds a synced file. It ignores faults and does not count as a write.
func (d *Disk) Put(path string, data []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.visible[path], d.synced[path] = data, data
}

// Create implements [durable.FS]. If the disk crashes in it, it leaves a part of the file.
func (d *Disk) Create(path string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		if d.stopped && d.writes == d.stopAt || !d.stopped {
			d.visible[path] = data[:len(data)/2]
		}
		return err
	}
	if d.full {
		d.visible[path] = data[:len(data)/2]
		return syscall.ENOSPC
	}
	d.visible[path] = data
	return nil
}

func (d *Disk) MkdirAll(dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		return err
	}
	d.dirs[dir] = true
	return nil
}

func (d *Disk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		return err
	}
	data, ok := d.visible[from]
	if !ok {
		return fs.ErrNotExist
	}
	delete(d.visible, from)
	d.visible[to] = data
	return nil
}

func (d *Disk) Remove(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		return err
	}
	if _, ok := d.visible[path]; !ok {
		return fs.ErrNotExist
	}
	delete(d.visible, path)
	return nil
}

// SyncDir implements [durable.FS]: the names in the directory then survive a power cut.
func (d *Disk) SyncDir(dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		return err
	}
	maps.DeleteFunc(d.synced, func(path string, _ []byte) bool { return filepath.Dir(path) == dir })
	for path, data := range d.visible {
		if filepath.Dir(path) == dir {
			d.synced[path] = data
		}
	}
	return nil
}

// ReadFile returns the content of a file as a process sees it.
func (d *Disk) ReadFile(path string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		return nil, ErrStopped
	}
	data, ok := d.visible[path]
	if !ok {
		return nil, fs.ErrNotExist
	}
	if err := d.unread[path]; err != nil {
		return nil, err
	}
	return data, nil
}

// ReadDir returns the names in a directory as a process sees them.
func (d *Disk) ReadDir(dir string) ([]string, error) {
	d.mu.Lock()
	stopped, there := d.stopped, d.dirs[dir]
	d.mu.Unlock()
	switch {
	case stopped:
		return nil, ErrStopped
	case !there:
		return nil, syscall.ENOENT
	}
	return d.Names(dir), nil
}
