package state

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Binding says which kernel driver a GPU is bound to, as far as NVIDIA's driver is concerned. The
// values are those of enum nvmlsim_binding in lib/state.h.
type Binding uint64

const (
	// Bound means that NVIDIA's driver has the GPU. It is the state of every GPU of a node without
	// passthrough while the driver is loaded.
	Bound Binding = iota
	// Unbound means that no driver has the GPU. The next load of NVIDIA's driver takes it.
	Unbound
	// Away means that another driver has the GPU, or that none has it and its driver_override names
	// another driver.
	Away
	// BoundOverridden is Bound with a driver_override that names another driver, which has no effect
	// until the GPU is unbound.
	BoundOverridden
)

// LoadBinding returns which driver the GPU is bound to.
func (g *GPU) LoadBinding() Binding { return Binding(atomic.LoadUint64(&g.Binding)) }

// Attached reports whether NVIDIA's driver has the GPU.
func (g *GPU) Attached() bool { return g.LoadBinding() == Bound || g.LoadBinding() == BoundOverridden }

func (g *GPU) bind(b Binding) { atomic.StoreUint64(&g.Binding, uint64(b)) }

// afterUnload is the binding of a GPU when its driver has been unloaded.
func (b Binding) afterUnload() Binding {
	switch b {
	case Bound:
		return Unbound
	case BoundOverridden:
		return Away
	default:
		return b
	}
}

func bindingAtBoot(card model.Card) Binding {
	if card.StartsAway() {
		return Away
	}
	return Bound
}

// Boot gives every GPU the kernel driver and the minor that it has after a boot of the node, and
// removes all MIG instances.
func (f *File) Boot(node *model.Node) error {
	return f.update(func() error {
		for i, card := range node.GPUs {
			f.GPU(i).bind(bindingAtBoot(card))
			atomic.StoreUint32(&f.GPU(i).Minor, *card.Minor)
			f.resetMIG(i, false)
		}
		atomic.StoreUint32(&f.Header().VFIOLoaded, vfioAtBoot(node))
		return nil
	})
}

func vfioAtBoot(node *model.Node) uint32 {
	return flag(node.Passthrough && (node.VFIO.Module == model.VFIOLoaded || node.VFIO.Module == model.VFIOBuiltin))
}

// SetVFIO loads or unloads the module vfio_pci.
func (f *File) SetVFIO(loaded bool) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.Header().VFIOLoaded, flag(loaded))
		f.wake()
		return nil
	})
}

// AwaitChange waits until another process changes the state, but no longer than longest.
func (f *File) AwaitChange(longest time.Duration) { f.sleep(longest) }

// SetBinding records that the GPU is bound to another driver than before. Bind is for a GPU that
// comes to NVIDIA's driver.
func (f *File) SetBinding(gpu int, b Binding) error {
	return f.update(func() error {
		f.GPU(gpu).bind(b)
		f.wake()
		return nil
	})
}

// Bind gives the GPU to NVIDIA's driver. As the driver finds it for the first time, the GPU has the
// lowest free minor, the state of anew, and no persistence mode.
func (f *File) Bind(gpu int, b Binding) error {
	if atomic.LoadUint32(&f.Header().DriverLoaded) == 0 {
		return ErrNotLoaded
	}
	return f.update(func() error {
		g := f.GPU(gpu)
		if g.Lost != 0 {
			return fmt.Errorf("GPU %d does not answer", gpu)
		}
		atomic.StoreUint32(&g.Minor, f.freeMinor(gpu))
		f.anew(gpu)
		atomic.StoreUint32(&g.PersistenceMode, 0)
		g.bind(b)
		f.wake()
		return nil
	})
}

// renumber gives minors to all GPUs of NVIDIA's driver, as its load does.
func (f *File) renumber() {
	var found []*GPU
	for i := range f.GPUCount() {
		if g := f.GPU(i); g.Present != 0 && g.Attached() {
			found = append(found, g)
		}
	}
	slices.SortStableFunc(found, func(a, b *GPU) int { return cmp.Compare(a.Minor, b.Minor) })
	for minor, g := range found {
		atomic.StoreUint32(&g.Minor, uint32(minor)) //nolint:gosec // a few GPUs
	}
}

// freeMinor returns the lowest minor that no other GPU of NVIDIA's driver has.
func (f *File) freeMinor(gpu int) uint32 {
	used := map[uint32]bool{}
	for i := range f.GPUCount() {
		if i != gpu && f.GPU(i).Present != 0 && f.GPU(i).Attached() {
			used[f.GPU(i).Minor] = true
		}
	}
	minor := uint32(0)
	for used[minor] {
		minor++
	}
	return minor
}

// Opened reports whether a process has the GPU open. An unbind of such a GPU from NVIDIA's kernel
// driver waits.
func (f *File) Opened(gpu int) bool { return f.held(lockOpen+int64(gpu), 1) }

// ErrKilled means that a fault killed the process that made the call.
var ErrKilled = errors.New("killed, as ordered")

// ErrIgnored means that a fault lets the call succeed without effect.
var ErrIgnored = errors.New("without effect, as ordered")

// Strike applies the faults of a call that this process serves for another one, whose PID is
// caller. The call has several names, such as one with the device and one without. A wait ends with
// stop. If after is set, the faults are those that come after the call's effect.
func (f *File) Strike(stop <-chan struct{}, caller, gpu int, after bool, functions ...string) error {
	for _, function := range functions {
		var failed error
		f.faults(function, gpu, after, func(fault *Fault, serial uint64) bool {
			switch fault.Kind {
			case FaultKill:
				failed = errors.Join(ErrKilled, killCaller(caller, fault.Group != 0))
			case FaultFail:
				failed = &FaultError{Function: function, Code: fault.Error}
			case FaultIgnore:
				failed = ErrIgnored
			default:
				f.await(fault, serial, stop)
			}
			return failed == nil
		})
		if failed != nil {
			return failed
		}
	}
	return nil
}

func killCaller(pid int, group bool) error {
	if group {
		leader, err := syscall.Getpgid(pid)
		if err != nil {
			return fmt.Errorf("find the process group of %d: %w", pid, err)
		}
		if own, err := syscall.Getpgid(0); err != nil || own == leader {
			return fmt.Errorf("process %d is in the simulator's own group", pid)
		}
		pid = -leader
	}
	if pid == 0 || pid == os.Getpid() {
		return fmt.Errorf("no process %d to kill", pid)
	}
	return syscall.Kill(pid, syscall.SIGKILL)
}

// await waits until the fault's delay is over, the fault is cleared, or stop is closed.
func (f *File) await(fault *Fault, serial uint64, stop <-chan struct{}) {
	end := time.Now().Add(fault.delay())
	for left := time.Until(end); atomic.LoadUint64(&fault.Serial) == serial && left > 0; left = time.Until(end) {
		select {
		case <-stop:
			return
		default:
			f.sleep(min(left, lookAgain))
		}
	}
}
