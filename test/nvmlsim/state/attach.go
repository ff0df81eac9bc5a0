package state

import (
	"sync/atomic"
	"time"
)

// SetAttachCost sets how long the driver takes to open a closed GPU. A cost also switches
// persistence mode off, because with persistence mode a GPU never closes.
func (f *File) SetAttachCost(cost time.Duration) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.Header().AttachCostMS, uint64(cost.Milliseconds()))
		for i := range f.GPUCount() {
			atomic.StoreUint32(&f.GPU(i).PersistenceMode, f.persistence())
		}
		return nil
	})
}

// Attaching reports whether a process is opening a closed GPU or changing MIG instances. While a
// process does either, it holds the driver's lock.
func (f *File) Attaching() bool { return f.held(lockCut, 1) }

// persistence returns the persistence mode that a GPU has right after the driver is loaded: off if
// opening a closed GPU takes time (AttachCost), and on otherwise.
func (f *File) persistence() uint32 { return flag(atomic.LoadUint64(&f.Header().AttachCostMS) == 0) }

// SetMemoryInfo sets whether NVML reports memory sizes for a GPU.
func (f *File) SetMemoryInfo(gpu int, has bool) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.GPU(gpu).NoMemoryInfo, uint64(flag(!has)))
		return nil
	})
}
