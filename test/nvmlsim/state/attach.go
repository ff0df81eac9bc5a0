package state

import (
	"sync/atomic"
	"time"
)

// SetAttachCost says how long the driver takes to open a GPU that nobody has open. A GPU with
// persistence mode is open always, so with a cost they lose it.
func (f *File) SetAttachCost(cost time.Duration) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.Header().AttachCostMS, uint64(cost.Milliseconds()))
		for i := range f.GPUCount() {
			atomic.StoreUint32(&f.GPU(i).PersistenceMode, f.persistence())
		}
		return nil
	})
}

// Attaching tells whether a process attaches a GPU, or changes MIG: both hold the driver's lock.
func (f *File) Attaching() bool { return f.held(lockCut, 1) }

// persistence is a GPU's persistence mode when the driver was just loaded.
func (f *File) persistence() uint32 { return flag(atomic.LoadUint64(&f.Header().AttachCostMS) == 0) }

// SetMemoryInfo says whether NVML has figures of a GPU's memory.
func (f *File) SetMemoryInfo(gpu int, has bool) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.GPU(gpu).NoMemoryInfo, uint64(flag(!has)))
		return nil
	})
}
