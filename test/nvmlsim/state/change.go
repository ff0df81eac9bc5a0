package state

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// NVML's event types.
const (
	eventSingleBitECC uint64 = 0x1
	eventDoubleBitECC uint64 = 0x2
	eventXID          uint64 = 0x8

	xidFellOffBus = 79
	noInstance    = ^uint32(0)
)

func (h *Header) setDriver(version, cuda string) error {
	parsed, err := model.ParseCUDAVersion(cuda)
	if err != nil {
		return err
	}
	if err := putString(h.DriverVersion[:], version, "driver version"); err != nil {
		return err
	}
	h.CUDAVersion = parsed
	return nil
}

// Address is the GPU's PCI address as sysfs writes it.
func (g *GPU) Address() string {
	return fmt.Sprintf("%04x:%02x:%02x.0", g.PCIDomain, g.PCIBus, g.PCIDevice)
}

// Find gives the number of the GPU that an index, UUID or PCI address names.
func (f *File) Find(name string) (int, error) {
	if i, err := strconv.Atoi(name); err == nil {
		if i < 0 || i >= f.GPUCount() {
			return 0, fmt.Errorf("no GPU %d: the node has %d", i, f.GPUCount())
		}
		return i, nil
	}
	for i := range f.GPUCount() {
		gpu := f.GPU(i)
		long := fmt.Sprintf("%08x:%02x:%02x.0", gpu.PCIDomain, gpu.PCIBus, gpu.PCIDevice)
		if Text(gpu.UUID[:]) == name || strings.EqualFold(gpu.Address(), name) || strings.EqualFold(long, name) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no GPU %q: give an index, a UUID or a PCI address such as 0000:1b:00.0", name)
}

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

// Restore brings a GPU back. A GPU that the driver did not find when it loaded is found at a process's next nvmlInit.
func (f *File) Restore(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		atomic.StoreUint32(&g.Lost, 0)
		atomic.StoreUint32(&g.Present, 1)
		atomic.StoreUint32(&g.RecoveryAction, 0)
		f.wake()
		return nil
	})
}

// XID reports an XID on a GPU.
func (f *File) XID(gpu int, code uint64) error {
	return f.update(func() error {
		f.post(gpu, eventXID, code)
		return nil
	})
}

// XIDOn reports an XID on a compute instance of a GPU.
func (f *File) XIDOn(gpu int, instance, compute uint32, code uint64) error {
	return f.update(func() error {
		f.postOn(gpu, instance, compute, eventXID, code)
		return nil
	})
}

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

// AnyGPU is a fault's GPU where it holds for every call.
const AnyGPU = -1

// AddFault puts a fault in force. Times below 1 means every call.
func (f *File) AddFault(fault Fault, function string, times int) error {
	if fault.DelayMS > uint64((24*time.Hour)/time.Millisecond) {
		return errors.New("a delay of more than a day")
	}
	return f.update(func() error {
		last, free := uint64(0), -1
		for i := range int(f.Header().FaultCount) {
			serial := f.Fault(i).Serial
			last = max(last, serial)
			spent := serial == 0 || atomic.LoadInt32(&f.Fault(i).Remaining) == 0
			if free < 0 && spent {
				free = i
			}
		}
		if free < 0 {
			return fmt.Errorf("all %d faults are in use: clear first", f.Header().FaultCount)
		}
		fault.Remaining = -1
		if times > 0 {
			fault.Remaining = int32(times)
		}
		if err := putString(fault.Function[:], function, "function name"); err != nil {
			return err
		}
		entry := f.Fault(free)
		atomic.StoreUint64(&entry.Serial, 0)
		fault.Serial = 0
		*entry = fault
		atomic.StoreUint64(&entry.Serial, last+1)
		return nil
	})
}

// ClearFaults ends all faults; calls that wait go on.
func (f *File) ClearFaults() error {
	return f.update(func() error {
		for i := range int(f.Header().FaultCount) {
			atomic.StoreUint64(&f.Fault(i).Serial, 0)
		}
		f.wake()
		return nil
	})
}

// Unload takes the driver away. It fails with ErrInUse while a process holds it, unless forced.
func (f *File) Unload(force bool) error {
	return f.idle(force, func() error {
		atomic.StoreUint32(&f.Header().DriverLoaded, 0)
		f.wake()
		return nil
	})
}

// Load loads the driver, of another version where one is given. What a driver forgets when it is loaded is forgotten:
// modes, MIG instances, volatile counters, pending remaps. A GPU that is lost is not found, and so not counted.
func (f *File) Load(version, cuda string, force bool) error {
	return f.idle(force, func() error {
		h := f.Header()
		if version != "" {
			if cuda == "" {
				cuda = fmt.Sprintf("%d.%d", h.CUDAVersion/1000, h.CUDAVersion%1000/10)
			}
			if err := h.setDriver(version, cuda); err != nil {
				return err
			}
		}
		for i := range f.GPUCount() {
			g := f.GPU(i)
			atomic.StoreUint32(&g.Present, flag(g.Lost == 0))
			g.forget()
			atomic.StoreUint32(&g.PersistenceMode, 1)
			f.resetMIG(i)
			atomic.StoreUint64(&g.ECCSingleVolatile, 0)
			atomic.StoreUint64(&g.ECCDoubleVolatile, 0)
			atomic.StoreUint32(&g.RemapPending, 0)
		}
		atomic.AddUint32(&h.DriverEpoch, 1)
		atomic.StoreUint32(&h.DriverLoaded, 1)
		f.wake()
		return nil
	})
}
