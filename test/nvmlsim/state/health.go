package state

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// post appends an event to the event table. It stores the entry's sequence number before the
// table's event count, and then wakes waiting processes, so that no reader sees a partial entry.
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

// LostAnswer is what NVML calls on a lost GPU return. The values are those of enum nvmlsim_lost in
// lib/state.h.
type LostAnswer uint32

const (
	// LostGone means GPU_IS_LOST.
	LostGone LostAnswer = 1
	// LostUnknown means UNKNOWN.
	LostUnknown LostAnswer = 2
	// LostSilent means UNKNOWN after a timeout, with XID 119 each time, because the GPU's system
	// processor is silent.
	LostSilent LostAnswer = 3
)

// defaultGSPTimeoutMS is how long the driver waits for the GPU's system processor.
const defaultGSPTimeoutMS = 6000

func lostAnswerOf(name string) LostAnswer {
	switch name {
	case model.LostGPUUnknown:
		return LostUnknown
	case model.LostGPUSilent:
		return LostSilent
	}
	return LostGone
}

// Lose makes a GPU fall off the bus. NVML calls on the GPU then fail as the node file's lostGPU
// says, and processes that wait for events first get XID 79.
func (f *File) Lose(gpu int) error { return f.LoseAs(gpu, LostAnswer(f.Header().LostAnswer)) }

// LoseAs is Lose with another answer than that of the node file.
func (f *File) LoseAs(gpu int, answer LostAnswer) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).Lost, uint32(answer))
		if answer != LostSilent { // the driver does not notice that the GPU is gone
			f.post(gpu, eventXID, xidFellOffBus)
		}
		return nil
	})
}

// SetGSPTimeout sets how long a call on a silent GPU takes.
func (f *File) SetGSPTimeout(d time.Duration) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.Header().GSPTimeoutMS, uint32(d.Milliseconds()))
		return nil
	})
}

// Restore brings a GPU back. If the driver was loaded without the GPU, a process sees the GPU after
// the process's next nvmlInit. A lost GPU comes back in its initial state, because on real hardware
// only a reset or a power cycle revives a lost GPU.
func (f *File) Restore(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		if atomic.LoadUint32(&g.Lost) != 0 {
			g.began()
		}
		if atomic.LoadUint32(&g.Present) == 0 {
			atomic.StoreUint32(&g.Minor, f.freeMinor(gpu))
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

// XIDOn reports an XID on a compute instance. instance is the ID of its GPU instance, and compute
// its own ID.
func (f *File) XIDOn(gpu int, instance, compute uint32, code uint64) error {
	return f.update(func() error {
		f.postOn(gpu, instance, compute, eventXID, code)
		return nil
	})
}

// Event reports an event on a GPU. kind is an nvmlEventType* value and data the event's data.
func (f *File) Event(gpu int, kind, data uint64) error {
	return f.update(func() error {
		f.post(gpu, kind, data)
		return nil
	})
}

// SetEventTypes sets which event types a process can register for, as a mask of nvmlEventType*
// bits.
func (f *File) SetEventTypes(gpu int, mask uint64) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.GPU(gpu).EventTypes, mask)
		return nil
	})
}

// SetRemap sets the state of row remapping: pending if a row will be remapped at the next reset,
// and failed if a remap has failed.
func (f *File) SetRemap(gpu int, pending, failed bool) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		atomic.StoreUint32(&g.RemapPending, flag(pending))
		atomic.StoreUint32(&g.RemapFailure, flag(failed))
		return nil
	})
}

// Unplug removes a GPU from its slot. Calls in processes that have the GPU open return GPU_IS_LOST,
// and other processes no longer find the GPU.
func (f *File) Unplug(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		atomic.StoreUint32(&g.Lost, 1)
		atomic.StoreUint32(&g.Present, 0)
		f.wake()
		return nil
	})
}

// Plug puts a GPU into the slot that Unplug emptied. Without a uuid it is the same GPU; with a uuid
// it is another GPU of the same model. A process finds the GPU after its next nvmlInit.
func (f *File) Plug(gpu int, uuid string) error {
	g := f.GPU(gpu)
	if atomic.LoadUint32(&g.Present) != 0 {
		return fmt.Errorf("the slot of GPU %d is not empty", gpu)
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
		atomic.StoreUint32(&g.Minor, f.freeMinor(gpu))
		g.bind(Bound)
		if atomic.LoadUint32(&f.Header().DriverLoaded) == 0 {
			g.bind(Unbound)
		}
		atomic.AddUint32(&g.Epoch, 1)
		atomic.StoreUint32(&g.Lost, 0)
		atomic.StoreUint32(&g.Present, 1)
		f.wake()
		return nil
	})
}

// anew gives a GPU the state that it has when the driver finds it: default modes, and no MIG
// instances, volatile ECC counts or pending remaps.
func (f *File) anew(gpu int) {
	g := f.GPU(gpu)
	g.forget()
	atomic.StoreUint32(&g.PersistenceMode, f.persistence())
	f.resetMIG(gpu, f.Header().TopologyStays != 0)
	atomic.StoreUint64(&g.ECCSingleVolatile, 0)
	atomic.StoreUint64(&g.ECCDoubleVolatile, 0)
	atomic.StoreUint32(&g.RemapPending, 0)
	atomic.StoreUint32(&g.RecoveryAction, 0)
	g.began()
}

// began stores the present time as the start of the GPU's energy counter, so that the counter
// restarts at 0.
func (g *GPU) began() { atomic.StoreUint64(&g.EnergySinceMS, uint64(time.Now().UnixMilli())) }

// References returns the kernel module's reference count: the processes that have NVML initialised
// or that compute, plus the GPUs that each of them has open. At 0 the module can be unloaded.
func (f *File) References() (int, error) {
	var own syscall.Stat_t
	if err := syscall.Fstat(int(f.file.Fd()), &own); err != nil {
		return 0, err
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0, fmt.Errorf("count the users of the state file: %w", err)
	}
	count := int64(0)
	for line := range strings.Lines(string(locks)) {
		// An example of a line: 12: OFDLCK ADVISORY READ -1 fe:00:811703 8192 8195
		words := strings.Fields(line)
		if len(words) < 8 || words[1] != "OFDLCK" || words[3] != "READ" || !strings.HasSuffix(words[5], fmt.Sprintf(":%d", own.Ino)) {
			continue
		}
		var first, last int64
		if n, err := fmt.Sscan(words[6]+" "+words[7], &first, &last); n != 2 || err != nil {
			continue // a lock to the end of the file: the simulator takes none
		}
		count += overlap(first, last, lockInUse, lockInUse) + overlap(first, last, lockOpen, lockOpen+int64(f.GPUCount())-1)
	}
	return int(count), nil
}

// overlap returns how many bytes the ranges first–last and from–to have in common. The caller needs
// it because /proc/locks shows one process's locks on neighbouring bytes as one range.
func overlap(first, last, from, to int64) int64 { return max(0, min(last, to)-max(first, from)+1) }

// ECC counts one memory error and reports it as an event. If double is true the error is
// uncorrectable, and a row will be remapped at the next reset.
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

// SetRecovery sets the recovery action that NVML reports for the GPU.
func (f *File) SetRecovery(gpu int, action uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).RecoveryAction, action)
		return nil
	})
}

// AnnounceRecovery sets the GPU's recovery action and posts two events: XID 154 and a recovery
// action event.
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

// Settle resets the settings of each GPU that no process has open and that has no persistence mode.
// A real driver does this when the last process closes the GPU. The simulator does it when the next
// process reads the state.
func (f *File) Settle() error {
	return f.update(func() error {
		for i := range f.GPUCount() {
			if g := f.GPU(i); f.Header().SettingsStay == 0 && g.PersistenceMode == 0 && !f.held(lockOpen+int64(i), 1) {
				g.forget()
			}
		}
		return nil
	})
}
