package state

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
)

// Ways in which the driver serialises calls that change MIG mode or MIG instances: one lock for all
// GPUs, one lock for each GPU, or no lock.
const (
	CutLockDriver uint32 = 0
	CutLockGPU    uint32 = 1
	CutLockNone   uint32 = 2
	// CutLockAll has one lock for all GPUs like CutLockDriver, but calls that change nothing wait too.
	CutLockAll uint32 = 3
)

const (
	instanceBit uint64 = 1 << 63
	// noInstanceWord is the instance ID in a packed Process that uses the whole GPU.
	noInstanceWord = 0xffff

	defaultFabricSettleMS = 300

	vGPUGuest = 2
)

// Instance is a GPU instance or a compute instance.
type Instance struct {
	ID, Profile, Start, Size uint32
	// Syspipe is 1 + the compute instance's syspipe, or 0 if the node does not count syspipes.
	Syspipe uint32
}

func unpack(id int, word uint64) (Instance, bool) {
	return Instance{
		ID:      uint32(id),
		Profile: uint32(word & 0xffff),
		Start:   uint32(word >> 16 & 0xff),
		Size:    uint32(word >> 24 & 0xff),
		Syspipe: uint32(word >> 32 & 0xff),
	}, word&instanceBit != 0
}

func (i Instance) pack() uint64 {
	return instanceBit | uint64(i.Syspipe&0xff)<<32 | uint64(i.Size&0xff)<<24 | uint64(i.Start&0xff)<<16 | uint64(i.Profile&0xffff)
}

// GPUInstances returns the GPU instances that exist on the GPU, ordered by ID.
func (g *GPU) GPUInstances() []Instance {
	var all []Instance
	for id := range g.Instances {
		if instance, exists := unpack(id, atomic.LoadUint64(&g.Instances[id])); exists {
			all = append(all, instance)
		}
	}
	return all
}

// OfInstance returns the compute instances of GPU instance id, ordered by ID.
func (g *GPU) OfInstance(id uint32) []Instance {
	var all []Instance
	if id >= gpuInstances {
		return nil
	}
	for ci := range g.ComputeInstances[id] {
		if instance, exists := unpack(ci, atomic.LoadUint64(&g.ComputeInstances[id][ci])); exists {
			all = append(all, instance)
		}
	}
	return all
}

// MIGUUID returns the UUID of a compute instance's MIG device. The same IDs on the same GPU give
// the same UUID, unless the node counts syspipes. lib/mig_devices.c has the same rule.
func (g *GPU) MIGUUID(instance, compute uint32) string {
	if own, exists := unpack(int(compute), atomic.LoadUint64(&g.ComputeInstances[instance][compute])); exists && own.Syspipe != 0 {
		compute = 0x80 | own.Syspipe
	}
	var half [2]uint64
	for i := range half {
		hash := uint64(0xcbf29ce484222325) + uint64(i)
		for _, c := range []byte(Text(g.UUID[:])) {
			hash = (hash ^ uint64(c)) * 0x100000001b3
		}
		x := hash ^ uint64(instance<<8|compute)<<20
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		half[i] = x ^ x>>31
	}
	half[0] = half[0]&^0xf000 | 0x5000
	half[1] = half[1]&^(3<<62) | 2<<62
	return fmt.Sprintf("MIG-%08x-%04x-%04x-%04x-%012x", half[0]>>32, half[0]>>16&0xffff, half[0]&0xffff, half[1]>>48, half[1]&0xffffffffffff)
}

// GPUInstanceMinor returns the minor number of a GPU instance's capability device node.
func (g *GPU) GPUInstanceMinor(instance uint32) uint32 {
	return 3 + (g.Minor*gpuInstances+instance)*(1+computeInstances)
}

// ComputeInstanceMinor returns the minor number of a compute instance's capability device node.
func (g *GPU) ComputeInstanceMinor(instance, compute uint32) uint32 {
	return g.GPUInstanceMinor(instance) + 1 + compute
}

// Profile returns the model's GPU instance profile with this ID. The Boolean result is false if
// there is none.
func (m *Model) Profile(id uint32) (*Profile, bool) {
	for i := range m.Profiles[:m.ProfileCount] {
		if m.Profiles[i].ID == id {
			return &m.Profiles[i], true
		}
	}
	return nil, false
}

// resetMIG removes the GPU's MIG instances, as a reset does. A GPU that needs a reset to change its
// MIG mode then takes its pending mode; any other GPU leaves MIG mode. With "stays" a GPU in MIG
// mode keeps the mode and its instances.
func (f *File) resetMIG(gpu int, stays bool) {
	g := f.GPU(gpu)
	if g.Virtualization == vGPUGuest { // only the host changes the MIG instances of a guest
		return
	}
	for i := range g.Processes {
		atomic.StoreUint64(&g.Processes[i], 0)
	}
	if stays && g.MIGCurrent != 0 && g.MIGPending != 0 {
		return
	}
	for id := range g.Instances {
		for ci := range g.ComputeInstances[id] {
			atomic.StoreUint64(&g.ComputeInstances[id][ci], 0)
		}
		atomic.StoreUint64(&g.Instances[id], 0)
	}
	if f.Model(int(g.Model)).MIGNeedsReset == 0 {
		atomic.StoreUint32(&g.MIGPending, 0)
	}
	atomic.StoreUint32(&g.MIGCurrent, g.MIGPending)
}

// forget sets the GPU's compute mode and time-slice to their defaults, as a driver does at a reset,
// at a driver load and, without persistence mode, when the last process closes the GPU.
func (g *GPU) forget() {
	atomic.StoreUint32(&g.ComputeMode, 0)
	atomic.StoreUint32(&g.TimeSlice, 0)
}

// ErrBusy means that processes compute on the GPU.
var ErrBusy = errors.New("processes compute on the GPU")

// Reset resets one GPU, like nvidia-smi --gpu-reset. While processes compute on the GPU it returns
// ErrBusy, unless force is true.
func (f *File) Reset(gpu int, force bool) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		if !force && (len(g.Busy()) > 0 || f.Computed(gpu)) {
			return fmt.Errorf("GPU %d: %w", gpu, ErrBusy)
		}
		persistence := g.PersistenceMode
		f.anew(gpu)
		atomic.StoreUint32(&g.PersistenceMode, persistence)
		f.wake()
		return nil
	})
}

// Process is a process that NVML lists as computing on a GPU. It uses the whole GPU unless
// InInstance is true.
type Process struct {
	PID               uint32
	InInstance        bool
	Instance, Compute uint32
}

func (p Process) pack() uint64 {
	if !p.InInstance {
		p.Instance, p.Compute = noInstanceWord, noInstanceWord
	}
	return uint64(p.PID)<<32 | uint64(p.Instance&0xffff)<<16 | uint64(p.Compute&0xffff)
}

// Busy returns the processes that NVML lists on the GPU.
func (g *GPU) Busy() []Process {
	var all []Process
	for i := range g.Processes {
		word := atomic.LoadUint64(&g.Processes[i])
		if word == 0 {
			continue
		}
		p := Process{PID: uint32(word >> 32)}
		if gi := uint32(word >> 16 & 0xffff); gi != noInstanceWord {
			p.InInstance, p.Instance, p.Compute = true, gi, uint32(word&0xffff)
		}
		all = append(all, p)
	}
	return all
}

// SetBusy adds processes to those that NVML lists on the GPU.
func (f *File) SetBusy(gpu int, processes ...Process) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		for _, p := range processes {
			if p.PID == 0 {
				return errors.New("0 is not a PID")
			}
			if slices.Contains(g.Busy(), p) {
				continue
			}
			free := slices.Index(g.Processes[:], 0)
			if free < 0 {
				return fmt.Errorf("GPU %d: the list of %d processes is full: empty it with --clear", gpu, maxProcesses)
			}
			atomic.StoreUint64(&g.Processes[free], p.pack())
		}
		return nil
	})
}

// ClearBusy empties the list of processes that NVML shows for the GPU.
func (f *File) ClearBusy(gpu int) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		for i := range g.Processes {
			atomic.StoreUint64(&g.Processes[i], 0)
		}
		return nil
	})
}

// SetCutLock sets how the driver serialises calls that change MIG, as one of the CutLock* values.
func (f *File) SetCutLock(kind uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.Header().CutLock, kind)
		return nil
	})
}

// SetFabricStatus sets the result of a completed fabric registration: 0 for success, or an error as
// nvmlReturn_t.
func (f *File) SetFabricStatus(gpu int, status uint32) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.GPU(gpu).FabricStatus, status)
		return nil
	})
}

// SetFabric sets a GPU's fabric state. If period is positive, the GPU returns to its previous
// fabric state after that time.
func (f *File) SetFabric(gpu int, fabric uint32, period time.Duration) error {
	return f.update(func() error {
		g := f.GPU(gpu)
		if period <= 0 {
			atomic.StoreUint32(&g.FabricState, fabric)
			atomic.StoreUint64(&g.FabricUntilMS, 0)
			return nil
		}
		atomic.StoreUint32(&g.FabricInterim, fabric)
		atomic.StoreUint64(&g.FabricUntilMS, uint64(time.Now().Add(period).UnixMilli()))
		return nil
	})
}

// SetFabricSettle sets how long a GPU that leaves MIG mode takes to register with the NVLink fabric
// again.
func (f *File) SetFabricSettle(settle time.Duration) error {
	return f.update(func() error {
		atomic.StoreUint64(&f.Header().FabricSettleMS, uint64(settle.Milliseconds()))
		return nil
	})
}

// Place stores in the state file where the simulated node's files and device nodes are. The library
// needs the paths because it creates and removes MIG capability files and device nodes.
func (f *File) Place(root, devices string, capsMajor uint32, plain bool) error {
	return f.update(func() error {
		h := f.Header()
		if Text(h.Root[:]) != root {
			if err := putString(h.Root[:], root, "layout's folder"); err != nil {
				return err
			}
		}
		if Text(h.Devices[:]) != devices {
			if err := putString(h.Devices[:], devices, "folder of device nodes"); err != nil {
				return err
			}
		}
		atomic.StoreUint32(&h.CapsMajor, capsMajor)
		atomic.StoreUint32(&h.PlainDevices, flag(plain))
		return nil
	})
}

// WithCapabilities calls do while no other process changes the MIG capability files and device
// nodes.
func (f *File) WithCapabilities(do func() error) error {
	if err := f.lock(syscall.F_WRLCK, lockCapabilities, true); err != nil {
		return fmt.Errorf("lock state file %s: %w", f.path, err)
	}
	return errors.Join(do(), f.lock(syscall.F_UNLCK, lockCapabilities, false))
}
