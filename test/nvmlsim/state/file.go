package state

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Commands for open-file-description locks, from linux/fcntl.h. Such a lock belongs to the open
// file, not to the process, and ends when the file is closed.
const (
	fOFDGetLock     = 36
	fOFDSetLock     = 37
	fOFDSetLockWait = 38
)

// ErrInUse means that a process has called nvmlInit and not yet nvmlShutdown.
var ErrInUse = errors.New("a process has initialised NVML")

// File is a state file that is mapped into this process.
type File struct {
	path     string
	file     *os.File
	mapped   []byte
	readOnly bool
}

// Create writes a state file for the node in spec. It rewrites an existing file in place, so that
// processes that have mapped the file see the new state.
func Create(path string, spec Spec) (*File, error) {
	used, index, err := spec.usedModels()
	if err != nil {
		return nil, err
	}
	var header Header
	header.size(len(used), len(spec.Node.GPUs))

	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("create state file: %w", err)
	}
	f := &File{path: path, file: file}
	if err := f.lock(syscall.F_WRLCK, lockWrite, true); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("lock state file %s: %w", path, err)
	}
	// The file must not shrink: a process that has mapped the old content would die when it reads a
	// missing page.
	info, err := file.Stat()
	if err == nil && uint64(info.Size()) < header.TotalSize {
		err = file.Truncate(int64(header.TotalSize))
	}
	if err == nil {
		err = f.mapFile()
	}
	if err == nil {
		err = f.fill(header, spec, index)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("create state file %s: %w", path, err)
	}
	return f, f.lock(syscall.F_UNLCK, lockWrite, false)
}

func (f *File) fill(header Header, spec Spec, index map[string]uint32) error {
	epoch := uint32(1)
	if old := f.Header(); old.Magic == Magic {
		epoch = old.DriverEpoch + 1
	}
	// The magic number makes the file valid. It is removed first and stored last.
	atomic.StoreUint64(&f.Header().Magic, 0)
	clear(f.mapped)

	header.DriverEpoch = epoch
	header.DriverLoaded = 1
	header.FabricSettleMS = defaultFabricSettleMS
	header.blocks(spec.Node)
	header.AttachCostMS = uint64(spec.Node.AttachCost.Milliseconds())
	header.VFIOLoaded = vfioAtBoot(spec.Node)
	if err := putString(header.NodeName[:], spec.Node.Name, "node name"); err != nil {
		return err
	}
	if err := putString(header.Seed[:], spec.Seed, "seed"); err != nil {
		return err
	}
	if err := header.setDriver(spec.DriverVersion, spec.CUDAVersion); err != nil {
		return err
	}
	header.Magic = 0
	*f.Header() = header
	for key, i := range index {
		if err := compileModel(spec.Models[key], f.Model(int(i))); err != nil {
			return fmt.Errorf("GPU model %s: %w", key, err)
		}
	}
	for i, card := range spec.Node.GPUs {
		if err := compileCard(card, index[card.Model], f.GPU(i)); err != nil {
			return fmt.Errorf("GPU at %s: %w", card.PCI, err)
		}
		f.GPU(i).PersistenceMode = f.persistence()
		f.GPU(i).EventTypes = uint64(f.Model(int(index[card.Model])).EventTypes)
		f.GPU(i).began()
		if err := f.GPU(i).cut(f.Model(int(index[card.Model])), card.MIG, spec.Node.UUIDBySyspipe); err != nil {
			return fmt.Errorf("GPU at %s: %w", card.PCI, err)
		}
	}
	atomic.StoreUint64(&f.Header().Magic, Magic)
	return nil
}

// Open maps an existing state file for reading and writing.
func Open(path string) (*File, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open state file: %w", err)
	}
	f := &File{path: path, file: file}
	if err := f.mapFile(); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("open state file %s: %w", path, err)
	}
	if err := f.check(); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("state file %s: %w", path, err)
	}
	return f, nil
}

func (f *File) mapFile() error {
	info, err := f.file.Stat()
	if err != nil {
		return err
	}
	if info.Size() < int64(unsafe.Sizeof(Header{})) {
		return errors.New("too short to be a state file")
	}
	protection := syscall.PROT_READ | syscall.PROT_WRITE
	if f.readOnly {
		protection = syscall.PROT_READ
	}
	f.mapped, err = syscall.Mmap(int(f.file.Fd()), 0, int(info.Size()), protection, syscall.MAP_SHARED)
	return err
}

func (f *File) check() error {
	have := f.Header()
	if have.Magic != Magic {
		return errors.New("not a state file")
	}
	var want Header
	want.size(int(have.ModelCount), int(have.GPUCount))
	if have.shape() != want.shape() || have.TotalSize > uint64(len(f.mapped)) {
		return fmt.Errorf("made by another build (layout %d, this tool has %d): make it again with layout up --fresh", have.Layout, Layout)
	}
	return nil
}

// Close unmaps the file.
func (f *File) Close() error {
	var unmap error
	if f.mapped != nil {
		unmap = syscall.Munmap(f.mapped)
		f.mapped = nil
	}
	return errors.Join(unmap, f.file.Close())
}

// Path returns the path with which the file was opened.
func (f *File) Path() string { return f.path }

func at[T any](f *File, offset uint64) *T { return (*T)(unsafe.Pointer(&f.mapped[offset])) }

// Header returns the header of the mapped file.
func (f *File) Header() *Header { return at[Header](f, 0) }

// GPUCount returns the number of the node's GPUs, including lost ones.
func (f *File) GPUCount() int { return int(f.Header().GPUCount) }

// GPU returns the i-th GPU in the order of PCI addresses.
func (f *File) GPU(i int) *GPU {
	return at[GPU](f, f.Header().GPUOffset+uint64(i)*uint64(unsafe.Sizeof(GPU{})))
}

// Model returns the i-th GPU model of the file.
func (f *File) Model(i int) *Model {
	return at[Model](f, f.Header().ModelOffset+uint64(i)*uint64(unsafe.Sizeof(Model{})))
}

// Fault returns the i-th entry of the fault table.
func (f *File) Fault(i int) *Fault {
	return at[Fault](f, f.Header().FaultOffset+uint64(i)*uint64(unsafe.Sizeof(Fault{})))
}

func (f *File) event(seq uint64) *Event {
	h := f.Header()
	return at[Event](f, h.EventOffset+(seq%uint64(h.EventCount))*uint64(unsafe.Sizeof(Event{})))
}

func (f *File) lock(kind int16, start int64, wait bool) error {
	command := fOFDSetLock
	if wait {
		command = fOFDSetLockWait
	}
	lock := syscall.Flock_t{Type: kind, Whence: 0, Start: start, Len: 1}
	for {
		err := syscall.FcntlFlock(f.file.Fd(), command, &lock)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// update calls change while it has the write lock of the state file.
func (f *File) update(change func() error) error {
	if f.readOnly {
		return fmt.Errorf("state file %s: %w", f.path, os.ErrPermission)
	}
	if err := f.lock(syscall.F_WRLCK, lockWrite, true); err != nil {
		return fmt.Errorf("lock state file %s: %w", f.path, err)
	}
	generation := &f.Header().Generation
	atomic.StoreUint64(generation, atomic.LoadUint64(generation)|1)
	err := change()
	atomic.AddUint64(generation, 1)
	return errors.Join(err, f.lock(syscall.F_UNLCK, lockWrite, false))
}

// idle calls change while no process has NVML initialised. If a process has, idle returns ErrInUse,
// unless force is true.
func (f *File) idle(force bool, change func() error) error {
	if !force {
		err := f.lock(syscall.F_WRLCK, lockInUse, false)
		if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EACCES) {
			return ErrInUse
		}
		if err != nil {
			return fmt.Errorf("lock state file %s: %w", f.path, err)
		}
		defer func() { _ = f.lock(syscall.F_UNLCK, lockInUse, false) }()
	}
	return f.update(change)
}

// InUse reports whether a process has NVML initialised.
func (f *File) InUse() bool { return f.held(lockInUse, 1) }

// held reports whether another open file has a lock on any of the count bytes from start.
func (f *File) held(start, count int64) bool {
	// This only asks for the lock's state. Taking the lock, even for a moment, could make another
	// process's nvmlInit fail.
	lock := syscall.Flock_t{Type: syscall.F_WRLCK, Whence: 0, Start: start, Len: count}
	return syscall.FcntlFlock(f.file.Fd(), fOFDGetLock, &lock) == nil && lock.Type != syscall.F_UNLCK
}
