package state

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// post appends an event. The entry's number is stored last, then the count, then sleepers are woken.
func (f *File) post(gpu int, kind, data uint64) { f.postOn(gpu, noInstance, noInstance, kind, data) }

func (f *File) postOn(gpu int, instance, compute uint32, kind, data uint64) {
	h := f.Header()
	seq := h.EventSeq
	entry := f.event(seq)
	atomic.StoreUint64(&entry.Seq, 0)
	entry.Type, entry.Data, entry.GPU = kind, data, uint32(gpu)
	entry.GPUInstance, entry.ComputeInstance = instance, compute
	atomic.StoreUint64(&entry.Seq, seq+1)
	atomic.StoreUint64(&h.EventSeq, seq+1)
	f.wake()
}

func (f *File) wake() {
	const futexWake = 1
	word := &f.Header().EventWake
	atomic.AddUint32(word, 1)
	_, _, _ = syscall.Syscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, 1<<30, 0, 0, 0)
}

// Lose drops a GPU off the bus: NVML calls on it answer GPU_IS_LOST, and waiters first get XID 79.
func (f *File) Lose(gpu int) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).Lost, 1)
		f.post(gpu, eventXID, xidFellOffBus)
		return nil
	})
}

// Restore brings a GPU back. A GPU that the driver did not find when it loaded is found at a process's next nvmlInit. One that was lost has begun anew: only
// a reset or new power brings it back.
func (f *File) Restore(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		if atomic.LoadUint32(&g.Lost) != 0 {
			g.began()
		}
		atomic.StoreUint32(&g.Lost, 0)
		atomic.StoreUint32(&g.Present, 1)
		atomic.StoreUint32(&g.RecoveryAction, 0)
		f.wake()
		return nil
	})
}

// XID reports an XID on a GPU.
func (f *File) XID(gpu int, code uint64) error { return f.Event(gpu, eventXID, code) }

// XIDOn reports an XID on a compute instance of a GPU.
func (f *File) XIDOn(gpu int, instance, compute uint32, code uint64) error {
	return f.update(func() error {
		f.postOn(gpu, instance, compute, eventXID, code)
		return nil
	})
}

// Event reports an event of any kind: an nvmlEventType* with its data.
func (f *File) Event(gpu int, kind, data uint64) error {
	return f.update(func() error {
		f.post(gpu, kind, data)
		return nil
	})
}

// SetEventTypes says which events can be registered for, as a mask of nvmlEventType*.
func (f *File) SetEventTypes(gpu int, mask uint64) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.GPU(gpu).EventTypes, mask)
		return nil
	})
}

// SetRemap says whether a row waits for the next reset to be remapped, and whether one could not be.
func (f *File) SetRemap(gpu int, pending, failed bool) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		atomic.StoreUint32(&g.RemapPending, flag(pending))
		atomic.StoreUint32(&g.RemapFailure, flag(failed))
		return nil
	})
}

// Unplug takes a card out of its slot: it is lost to those who have it open, and the others do not find it any more.
func (f *File) Unplug(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		atomic.StoreUint32(&g.Lost, 1)
		atomic.StoreUint32(&g.Present, 0)
		f.wake()
		return nil
	})
}

// Plug puts a card into the slot that Unplug left: the same one, or, with a UUID, another of its model. A process finds it at its next nvmlInit.
func (f *File) Plug(gpu int, uuid string) error {
	g := f.GPU(gpu)
	if atomic.LoadUint32(&g.Present) != 0 {
		return fmt.Errorf("GPU %d is there already", gpu)
	}
	return f.update(func() error {
		if uuid != "" {
			if err := putString(g.UUID[:], uuid, "UUID"); err != nil {
				return err
			}
			atomic.StoreUint32(&g.RemapFailure, 0)
			atomic.StoreUint64(&g.ECCSingleAggregate, 0)
			atomic.StoreUint64(&g.ECCDoubleAggregate, 0)
		}
		f.anew(gpu)
		atomic.AddUint32(&g.Epoch, 1)
		atomic.StoreUint32(&g.Lost, 0)
		atomic.StoreUint32(&g.Present, 1)
		f.wake()
		return nil
	})
}

// anew is what a GPU is when a driver has just found it: without modes, MIG instances, volatile counters, pending remaps.
func (f *File) anew(gpu int) {
	g := f.GPU(gpu)
	g.forget()
	atomic.StoreUint32(&g.PersistenceMode, f.persistence())
	f.resetMIG(gpu)
	atomic.StoreUint64(&g.ECCSingleVolatile, 0)
	atomic.StoreUint64(&g.ECCDoubleVolatile, 0)
	atomic.StoreUint32(&g.RemapPending, 0)
	atomic.StoreUint32(&g.RecoveryAction, 0)
	g.began()
}

// began notes that what the GPU uses is counted from now on.
func (g *GPU) began() { atomic.StoreUint64(&g.EnergySinceMS, uint64(time.Now().UnixMilli())) }

// References are how many processes have NVML initialised or compute, and how many GPUs they have open, each counted for each: what the kernel module's
// reference count is on a real node. It goes to zero when nobody keeps the module from being unloaded.
func (f *File) References() (int, error) {
	var own syscall.Stat_t
	if err := syscall.Fstat(int(f.file.Fd()), &own); err != nil {
		return 0, err
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0, fmt.Errorf("count who holds the state file: %w", err)
	}
	count := int64(0)
	for line := range strings.Lines(string(locks)) {
		// 12: OFDLCK ADVISORY  READ -1 fe:00:811703 8192 8195
		words := strings.Fields(line)
		if len(words) < 8 || words[1] != "OFDLCK" || words[3] != "READ" || !strings.HasSuffix(words[5], fmt.Sprintf(":%d", own.Ino)) {
			continue
		}
		var first, last int64
		if n, err := fmt.Sscan(words[6]+" "+words[7], &first, &last); n != 2 || err != nil {
			continue // to the end of the file: none of ours
		}
		count += overlap(first, last, lockInUse, lockInUse) + overlap(first, last, lockOpen, lockOpen+int64(f.GPUCount())-1)
	}
	return int(count), nil
}

// overlap is how many bytes two ranges have in common. The kernel makes one of neighbouring ranges.
func overlap(first, last, from, to int64) int64 { return max(0, min(last, to)-max(first, from)+1) }

// ECC counts one memory error and reports it. An uncorrectable one also leaves a row to be remapped at the next reset.
func (f *File) ECC(gpu int, double bool) error {
	if f.Model(int(f.GPU(gpu).Model)).ECC == 0 {
		return fmt.Errorf("GPU %d has no ECC", gpu)
	}
	return f.update(func() error {
		g := f.GPU(gpu)
		if !double {
			atomic.AddUint64(&g.ECCSingleVolatile, 1)
			atomic.AddUint64(&g.ECCSingleAggregate, 1)
			f.post(gpu, eventSingleBitECC, 0)
			return nil
		}
		atomic.AddUint64(&g.ECCDoubleVolatile, 1)
		atomic.AddUint64(&g.ECCDoubleAggregate, 1)
		atomic.StoreUint32(&g.RemapPending, 1)
		f.post(gpu, eventDoubleBitECC, 0)
		return nil
	})
}

// SetRecovery sets the recovery action that the GPU asks for.
func (f *File) SetRecovery(gpu int, action uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).RecoveryAction, action)
		return nil
	})
}

// AnnounceRecovery sets the recovery action, and reports it by XID 154 and by an event of its own.
func (f *File) AnnounceRecovery(gpu int, action uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).RecoveryAction, action)
		f.post(gpu, eventXID, xidRecoveryChanged)
		f.post(gpu, eventRecoveryAction, uint64(action))
		return nil
	})
}

// SetComputeMode sets a GPU's compute mode, NVML_COMPUTEMODE_* of nvml.h.
func (f *File) SetComputeMode(gpu int, mode uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).ComputeMode, mode)
		return nil
	})
}

// SetTimeSlice sets the length of a GPU's time-slices: 0 default, 1 short, 2 medium, 3 long.
func (f *File) SetTimeSlice(gpu int, slice uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).TimeSlice, slice)
		return nil
	})
}

// Settle makes GPUs without persistence mode that nobody has open forget what was set, as the driver does at once: here it is done by whoever looks
// next.
func (f *File) Settle() error {
	return f.update(func() error {
		for i := range f.GPUCount() {
			if g := f.GPU(i); g.PersistenceMode == 0 && !f.held(lockOpen+int64(i), 1) {
				g.forget()
			}
		}
		return nil
	})
}
