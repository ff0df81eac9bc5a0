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

// NVML's event types.
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
			f.anew(i)
		}
		atomic.AddUint32(&h.DriverEpoch, 1)
		atomic.StoreUint32(&h.DriverLoaded, 1)
		f.wake()
		return nil
	})
}
