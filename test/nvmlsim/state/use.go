package state

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// Compute modes: NVML_COMPUTEMODE_* values of nvml.h.
const (
	computeProhibited       = 2
	computeExclusiveProcess = 3
)

var (
	// ErrNotLoaded means that no driver is loaded.
	ErrNotLoaded = errors.New("the driver is not loaded")
	// ErrTaken means that the GPU is in exclusive mode and another process computes on it.
	ErrTaken = errors.New("in compute mode EXCLUSIVE_PROCESS, and another process computes on it")
	// ErrProhibited means that the GPU's compute mode lets no process compute.
	ErrProhibited = errors.New("in compute mode PROHIBITED")
)

// OpenView maps a state file for a computing process. If the process may not write to the file, as
// in a container, the mapping is read-only.
func OpenView(path string) (*File, error) {
	f, err := Open(path)
	if err == nil || (!errors.Is(err, os.ErrPermission) && !errors.Is(err, syscall.EROFS)) {
		return f, err
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open state file: %w", err)
	}
	f = &File{path: path, file: file, readOnly: true}
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

// ReadOnly reports whether the file is mapped read-only, so that this process cannot change it.
func (f *File) ReadOnly() bool { return f.readOnly }

// Device is a whole GPU, or the MIG device of a compute instance if MIG is true.
type Device struct {
	GPU               int
	MIG               bool
	Instance, Compute uint32
}

// slot returns the offset of the device's byte within the GPU's lock range. A process that computes
// on the device locks this byte.
func (d Device) slot() int64 {
	if !d.MIG {
		return 0
	}
	return int64(1 + d.Instance*(1+computeInstances) + d.Compute)
}

// HoldDriver keeps the driver from being unloaded while the file is open.
func (f *File) HoldDriver() error {
	if atomic.LoadUint32(&f.Header().DriverLoaded) == 0 {
		return ErrNotLoaded
	}
	if err := f.lock(syscall.F_RDLCK, lockInUse, false); err != nil {
		return ErrNotLoaded
	}
	return nil
}

// Attach keeps the GPU open while the file is open, as a process does that only opens its device
// node.
func (f *File) Attach(gpu int) error {
	if err := f.HoldDriver(); err != nil {
		return err
	}
	return f.lock(syscall.F_RDLCK, lockOpen+int64(gpu), false)
}

// Take registers this process as computing on the device until the file is closed. It fails if the
// GPU's compute mode does not allow another process.
func (f *File) Take(d Device) error {
	if err := syscall.Flock(int(f.file.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock state file %s: %w", f.path, err)
	}
	defer func() { _ = syscall.Flock(int(f.file.Fd()), syscall.LOCK_UN) }()
	if !f.readOnly {
		if err := f.Settle(); err != nil {
			return err
		}
	}
	g, first := f.GPU(d.GPU), lockCompute+int64(d.GPU)*computeBytes
	if atomic.LoadUint32(&g.MIGCurrent) == 0 {
		switch atomic.LoadUint32(&g.ComputeMode) {
		case computeProhibited:
			return ErrProhibited
		case computeExclusiveProcess:
			if f.held(first, computeBytes) {
				return ErrTaken
			}
		}
	}
	return errors.Join(f.lock(syscall.F_RDLCK, lockOpen+int64(d.GPU), false), f.lock(syscall.F_RDLCK, first+d.slot(), false))
}

// Computed reports whether another process, or another File of this process, is registered as
// computing on the GPU.
func (f *File) Computed(gpu int) bool {
	return f.held(lockCompute+int64(gpu)*computeBytes, computeBytes)
}

// FaultError is the error that a test injected for a function.
type FaultError struct {
	Function string
	Code     uint32
}

func (e *FaultError) Error() string {
	return fmt.Sprintf("%s: %s, as ordered", e.Function, ErrorName(e.Code))
}

// lookAgain is how long sleep may wait at most before Meet looks at the fault again. It matters
// only if a wake-up was missed.
const lookAgain = 100 * time.Millisecond

// sleep waits until another process changes the state, but no longer than longest.
func (f *File) sleep(longest time.Duration) {
	const futexWait = 0
	word := &f.Header().EventWake
	pause := syscall.NsecToTimespec(longest.Nanoseconds())
	_, _, _ = syscall.Syscall6(
		syscall.SYS_FUTEX,
		uintptr(unsafe.Pointer(word)),
		futexWait,
		uintptr(atomic.LoadUint32(word)),
		uintptr(unsafe.Pointer(&pause)),
		0,
		0,
	)
}

// Meet applies the faults that a test injected for function, as lib/faults.c does for NVML
// functions: the call waits, returns an error, or dies. A negative gpu means that the call concerns
// no GPU.
func (f *File) Meet(function string, gpu int) error {
	var failed error
	f.faults(function, gpu, false, func(fault *Fault, serial uint64) bool {
		switch fault.Kind {
		case FaultKill:
			target := os.Getpid()
			if fault.Group != 0 {
				target = 0
			}
			_ = syscall.Kill(target, syscall.SIGKILL)
			select {}
		case FaultFail:
			failed = &FaultError{Function: function, Code: fault.Error}
			return false
		}
		f.await(fault, serial, nil)
		return true
	})
	return failed
}

// faults calls do with each fault that applies to the function, until do returns false. serial is
// the fault's number while it is in force.
func (f *File) faults(function string, gpu int, after bool, do func(fault *Fault, serial uint64) bool) {
	for i := range int(f.Header().FaultCount) {
		fault := f.Fault(i)
		serial := atomic.LoadUint64(&fault.Serial)
		on := fault.GPU == AnyGPU || int(fault.GPU) == gpu
		if serial == 0 || (fault.After != 0) != after || !on || Text(fault.Function[:]) != function || !f.meets(fault) {
			continue
		}
		if !do(fault, serial) {
			return
		}
	}
}

func (fault *Fault) delay() time.Duration {
	return time.Duration(min(fault.DelayMS, math.MaxInt32)) * time.Millisecond
}

// meets reports whether the fault still applies to this call. If the fault applies to a limited
// number of calls, meets counts this call as one of them.
func (f *File) meets(fault *Fault) bool {
	left := atomic.LoadInt32(&fault.Remaining)
	if f.readOnly {
		return left < 0
	}
	for left > 0 && !atomic.CompareAndSwapInt32(&fault.Remaining, left, left-1) {
		left = atomic.LoadInt32(&fault.Remaining)
	}
	if left == 0 {
		return false
	}
	atomic.AddUint64(&fault.Hits, 1)
	return true
}
