package state

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// NVML's event types: nvmlEventType* values of nvml.h.
const (
	eventSingleBitECC   uint64 = 0x1
	eventDoubleBitECC   uint64 = 0x2
	eventXID            uint64 = 0x8
	eventRecoveryAction uint64 = 0x8000

	xidFellOffBus      = 79
	xidRecoveryChanged = 154
	noInstance         = ^uint32(0)
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

// Address returns the GPU's PCI address as sysfs writes it.
func (g *GPU) Address() string {
	return fmt.Sprintf("%04x:%02x:%02x.0", g.PCIDomain, g.PCIBus, g.PCIDevice)
}

// Find returns the number of the GPU that name identifies. name is an index, a UUID or a PCI
// address.
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

// AnyGPU in a fault's GPU field makes the fault apply to calls on every GPU.
const AnyGPU = -1

// AddFault injects a fault into calls of function. The fault applies to the next times calls, or to
// every call if times is below 1.
func (f *File) AddFault(fault Fault, function string, times int) error {
	if fault.DelayMS > uint64((24*time.Hour)/time.Millisecond) {
		return errors.New("the delay is more than a day")
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
			return fmt.Errorf("all %d entries of the fault table are in use: clear the faults first", f.Header().FaultCount)
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

// ClearFaults removes all injected faults. Calls that a fault makes wait continue at once.
func (f *File) ClearFaults() error {
	return f.update(func() error {
		for i := range int(f.Header().FaultCount) {
			atomic.StoreUint64(&f.Fault(i).Serial, 0)
		}
		f.wake()
		return nil
	})
}

// Unload unloads the driver. While a process uses the driver, Unload fails with ErrInUse unless
// force is true.
func (f *File) Unload(force bool) error {
	return f.idle(force, func() error {
		atomic.StoreUint32(&f.Header().DriverLoaded, 0)
		for i := range f.GPUCount() {
			f.GPU(i).bind(f.GPU(i).LoadBinding().afterUnload())
		}
		f.wake()
		return nil
	})
}

// Load loads the driver. A non-empty version replaces the driver's version. Loading resets modes,
// MIG instances, volatile ECC counts and pending remaps; a lost GPU disappears. The GPUs that the
// driver finds are numbered anew from 0, in the order of the numbers that they had.
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
			if g.LoadBinding().afterUnload() == Away { // another driver keeps it
				g.bind(Away)
				continue
			}
			f.anew(i)
			g.bind(Bound)
		}
		f.renumber()
		atomic.AddUint32(&h.DriverEpoch, 1)
		atomic.StoreUint32(&h.DriverLoaded, 1)
		f.wake()
		return nil
	})
}
