package sysfs

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// bus is the kernel's PCI bus with its functions and drivers.
type bus struct {
	config *layout.Config
	state  *state.File
	// stop ends every wait when the file system is unmounted.
	stop chan struct{}

	// mu guards the fields below and those of the functions. It is never held during a wait.
	mu        sync.Mutex
	functions map[string]*function // by address
	order     []string
	dynamic   map[string][]id // IDs that new_id gave a driver
	vfio      vfio
	version   uint64 // changes with every change of the bus
}

// function is a function on the bus.
type function struct {
	layout.Function

	// lock is the kernel's device lock.
	lock chan struct{}
	// driver is the driver that has the function, also while it lets go of it. The driver of a GPU
	// that NVIDIA's driver has is in the state file only.
	driver string
	// leaving means that the driver lets go of the function. The links are then gone.
	leaving  bool
	override string
	// bindings counts the drivers that a write to sysfs gave the function.
	bindings uint32
	// epoch is the GPU's epoch in the state file. It changes with the card in the slot.
	epoch uint32
	vfio  *vfioDevice
}

// id is an entry of a driver's table of devices.
type id struct {
	vendor, device uint32 // anyID matches every number
	class, mask    uint32
}

const anyID = ^uint32(0)

func (i id) matches(f *function) bool {
	return (i.vendor == anyID || i.vendor == uint32(f.Vendor)) && (i.device == anyID || i.device == uint32(f.Device)) &&
		(i.class^f.Class)&i.mask == 0
}

func newBus(config *layout.Config, f *state.File) (*bus, error) {
	b := &bus{
		config: config, state: f, stop: make(chan struct{}), functions: map[string]*function{}, dynamic: map[string][]id{},
		vfio: vfio{groups: map[string]*vfioGroup{}},
	}
	// A card that is out of its slot now may be plugged in later.
	all, err := config.AllFunctions(f)
	if err != nil {
		return nil, err
	}
	for _, described := range all {
		d := &function{Function: described, lock: make(chan struct{}, 1)}
		if d.GPU >= 0 {
			d.epoch = f.GPU(d.GPU).Epoch
		}
		b.functions[d.Address] = d
		b.order = append(b.order, d.Address)
	}
	return b, b.boot()
}

// boot binds every function to the driver that it has at boot.
func (b *bus) boot() error {
	if err := b.makeControls(); err != nil {
		return err
	}
	for _, address := range b.order {
		d := b.functions[address]
		switch {
		case d.GPU >= 0 && b.state.GPU(d.GPU).Attached(), d.Driver == "":
		case b.isVFIO(d.Driver):
			d.override = d.Driver // as driverctl leaves it
			if errno := b.probe(d, d.Driver); errno != 0 {
				return fmt.Errorf("bind %s to %s at boot: %w", address, d.Driver, errno)
			}
		case d.GPU < 0:
			d.driver = d.Driver
		}
	}
	return nil
}

// find returns the function that a write names. Like the kernel, it ignores one newline at the end.
func (b *bus) find(text string) *function {
	d := b.functions[strings.TrimSuffix(text, "\n")]
	if d == nil || !b.present(d) {
		return nil
	}
	return d
}

// present reports whether the function is on the bus. A new card in the slot starts without what
// was written for the old one.
func (b *bus) present(d *function) bool {
	if d.GPU < 0 {
		return true
	}
	gpu := b.state.GPU(d.GPU)
	if epoch := atomic.LoadUint32(&gpu.Epoch); epoch != d.epoch {
		d.epoch, d.override = epoch, ""
		if !d.leaving {
			d.driver = ""
		}
	}
	return atomic.LoadUint32(&gpu.Present) != 0
}

// driverOf returns the driver that has the function, or nothing.
func (b *bus) driverOf(d *function) string {
	switch {
	case d.GPU >= 0 && b.state.GPU(d.GPU).Attached():
		return model.DriverNVIDIA
	case strings.HasPrefix(d.driver, model.DriverNVIDIA) && !d.leaving && !b.loaded():
		return ""
	default:
		return d.driver
	}
}

func (b *bus) loaded() bool { return atomic.LoadUint32(&b.state.Header().DriverLoaded) != 0 }

func (b *bus) driverVersion() string { return state.Text(b.state.Header().DriverVersion[:]) }

// driverBefore reports whether NVIDIA's driver is older than this version.
func (b *bus) driverBefore(version [3]int) bool {
	var is [3]int
	_, _ = fmt.Sscanf(b.driverVersion(), "%d.%d.%d", &is[0], &is[1], &is[2])
	return slices.Compare(is[:], version[:]) < 0
}

func (b *bus) vfioLoaded() bool { return atomic.LoadUint32(&b.state.Header().VFIOLoaded) != 0 }

// isVFIO reports whether the driver is a VFIO driver that the kernel has.
func (b *bus) isVFIO(driver string) bool {
	return b.vfioLoaded() && slices.ContainsFunc(b.config.VFIODrivers(), func(v layout.VFIODriver) bool { return v.Name == driver })
}

// drivers returns the drivers that the kernel has, in the order in which it asks them.
func (b *bus) drivers() []string {
	var all []string
	add := func(name string) {
		if name != "" && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	if b.loaded() {
		add(model.DriverNVIDIA)
	}
	for _, address := range b.order {
		d := b.functions[address]
		if d.GPU < 0 && !isVFIOName(d.Driver) && (b.loaded() || !strings.HasPrefix(d.Driver, model.DriverNVIDIA)) {
			add(d.Driver)
		}
		if d.Class>>8 == classAudio {
			add(driverAudio)
		}
	}
	if b.vfioLoaded() {
		for _, v := range b.config.VFIODrivers() {
			add(v.Name)
		}
	}
	return all
}

func isVFIOName(driver string) bool { return strings.HasSuffix(driver, model.DriverVFIO) }

// PCI classes, without the programming interface, and the driver of audio functions.
const (
	classVGA     = 0x0300
	class3D      = 0x0302
	classAudio   = 0x0403
	vendorNVIDIA = 0x10de

	driverAudio = "snd_hda_intel"
)

// matches reports whether the driver wants the function, as pci_match_device of the kernel does: an
// override decides alone, and VFIO drivers want nothing without one, except by new_id.
func (b *bus) matches(driver string, d *function) bool {
	if d.override != "" {
		return d.override == driver
	}
	if slices.ContainsFunc(b.dynamic[driver], func(i id) bool { return i.matches(d) }) {
		return true
	}
	switch {
	case b.isVFIO(driver):
		return false
	case driver == model.DriverNVIDIA:
		return d.Vendor == vendorNVIDIA && (d.Class>>8 == classVGA || d.Class>>8 == class3D)
	case driver == driverAudio:
		return d.Class>>8 == classAudio
	default:
		return d.GPU < 0 && d.Driver == driver
	}
}

// acquire takes the function's lock. It fails only when the file system ends.
func (b *bus) acquire(d *function) syscall.Errno {
	select {
	case d.lock <- struct{}{}:
		return 0
	case <-b.stop:
		return syscall.ENODEV
	}
}

func (b *bus) release(d *function) { <-d.lock }

// locked calls do with mu, and notes that the bus may have changed.
func (b *bus) locked(do func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	do()
	b.version++
}

// binding is the word of the state file for a GPU with this driver and override.
func (b *bus) binding(d *function, driver string) state.Binding {
	other := d.override != "" && d.override != model.DriverNVIDIA
	switch {
	case driver == model.DriverNVIDIA && other:
		return state.BoundOverridden
	case driver == model.DriverNVIDIA:
		return state.Bound
	case driver != "" || other:
		return state.Away
	default:
		return state.Unbound
	}
}

// errnoOf returns the error of a system call that an operation of the simulator returned.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return errno
	default:
		return syscall.EIO
	}
}
