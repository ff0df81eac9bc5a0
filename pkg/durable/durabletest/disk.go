// Package durabletest has a disk for tests that ends the world between any two writes: by a killed process, which loses nothing that was written, or by
// a power cut, which loses every name that was not synced.
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

// ErrStopped is what every call gets after the world has ended.
var ErrStopped = errors.New("the process is dead")

// Disk is a disk in memory. Its zero value is not usable: see New.
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
}

var _ durable.FS = &Disk{}

// New is an empty disk that works.
func New() *Disk {
	return &Disk{visible: map[string][]byte{}, synced: map[string][]byte{}, dirs: map[string]bool{}}
}

// StopAt ends the world at the n-th write from now on, counted from 1.
func (d *Disk) StopAt(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes, d.stopAt = 0, n
}

// FailAt lets the n-th write from now on fail with err, and only that one.
func (d *Disk) FailAt(n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes, d.failAt, d.failure = 0, n, err
}

// Stopped says whether the world has ended.
func (d *Disk) Stopped() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stopped
}

// Writes counts the writes since the last StopAt or FailAt.
func (d *Disk) Writes() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.writes
}

// Restart is a new process on the same disk.
func (d *Disk) Restart() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopped, d.stopAt, d.failAt = false, 0, 0
}

// PowerCut forgets what was not synced, and starts again.
func (d *Disk) PowerCut() {
	d.mu.Lock()
	d.visible = maps.Clone(d.synced)
	d.mu.Unlock()
	d.Restart()
}

// PowerCutKeeping is a power cut before which some directories' names had found their way to the disk unasked.
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

// Clone is a disk with the same files, which works.
func (d *Disk) Clone() *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &Disk{visible: maps.Clone(d.visible), synced: maps.Clone(d.synced), dirs: maps.Clone(d.dirs)}
}

// State is every file as a process sees it, and as a power cut would leave it.
func (d *Disk) State() (visible, synced map[string][]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.visible), maps.Clone(d.synced)
}

// Write counts as a write to the disk and fails like one. Tests use it for what else their process changes.
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

// Names lists the files of a directory that a process sees.
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

// Put places a file, synced, past all faults.
func (d *Disk) Put(path string, data []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.visible[path], d.synced[path] = data, data
}

// Create leaves a part of the file if the world ends in it.
func (d *Disk) Create(path string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		if d.stopped && d.writes == d.stopAt || !d.stopped {
			d.visible[path] = data[:len(data)/2]
		}
		return err
	}
	d.visible[path] = data
	return nil
}

// MkdirAll makes a directory.
func (d *Disk) MkdirAll(dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.write(); err != nil {
		return err
	}
	d.dirs[dir] = true
	return nil
}

// Rename moves a name.
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

// Remove takes a name away.
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

// SyncDir makes a directory's names last.
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

// Hold does nothing: what is freed here is the garbage collector's.
func (d *Disk) Hold(string) (letGo func()) { return func() {} }

// ReadFile reads what a process sees.
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
	return data, nil
}

// ReadDir lists what a process sees.
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
