package sysfs

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// vfio is what VFIO knows of the functions that are bound to its drivers.
type vfio struct {
	// groups are the IOMMU groups with such a function, by the name of their device node.
	groups map[string]*vfioGroup
	// nextMinor and nextDevice never return to an old number, so that a test sees who keeps one.
	nextMinor, nextDevice, nextNoIOMMU uint32
}

// vfioGroup is a group's device node.
type vfioGroup struct {
	name      string
	number    layout.VFIONumber
	functions int
}

// vfioDevice is a function that is bound to a VFIO driver.
type vfioDevice struct {
	group  *vfioGroup
	number uint32
	id     layout.VFIONumber
	// withoutIOMMU means that the group exists only because of the module's unsafe parameter.
	withoutIOMMU bool
}

// lookAgain is how long the bus takes at most to notice that a module was loaded or unloaded.
const lookAgain = 200 * time.Millisecond

// follow waits until the module of VFIO is loaded or unloaded. A new driver takes the functions
// that have no driver and whose override names it. Unloading the module unbinds its functions and
// keeps their overrides.
func (b *bus) follow(booted bool) {
	for loaded := booted; ; {
		select {
		case <-b.stop:
			return
		default:
			b.state.AwaitChange(lookAgain)
		}
		if now := b.vfioLoaded(); now == loaded {
			continue
		}
		loaded = !loaded
		if err := b.makeControls(); err != nil {
			log.Printf("device nodes of VFIO: %v", err)
		}
		for _, address := range b.order {
			d := b.functions[address]
			_ = b.withLock(d, func() syscall.Errno {
				if !loaded && d.vfio != nil {
					b.unbindVFIO(d)
				}
				for _, v := range b.config.VFIODrivers() {
					if _, has := b.lookup(address); has == "" && b.wants(v.Name, d) {
						_ = b.probe(d, v.Name)
					}
				}
				return 0
			})
		}
	}
}

// makeControls creates the device nodes that VFIO has as soon as its module is loaded. They stay
// when only the module vfio_pci is unloaded.
func (b *bus) makeControls() error {
	if !b.vfioLoaded() {
		return nil
	}
	return b.config.MakeVFIOControl()
}

// bindVFIO binds the function to a VFIO driver. The device nodes appear after the node's delay.
func (b *bus) bindVFIO(d *function, driver string) syscall.Errno {
	settings := b.config.Node.VFIO
	if d.IOMMUGroup == nil && !settings.UnsafeNoIOMMU {
		return syscall.EINVAL
	}
	var bound *vfioDevice
	var err error
	b.locked(func() {
		if bound, err = b.registerVFIO(d); err != nil {
			return
		}
		d.driver, d.vfio = driver, bound
		if d.GPU >= 0 {
			err = b.state.SetBinding(d.GPU, b.binding(d, driver))
		}
	})
	if err != nil {
		log.Printf("bind %s to %s: %v", d.Address, driver, err)
		return syscall.EIO
	}
	makeNodes := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		select {
		case <-b.stop: // after the node's delay
			return
		default:
		}
		if err := b.makeNodes(d, bound); err != nil {
			log.Printf("device nodes of %s: %v", d.Address, err)
		}
	}
	if settings.NodeDelay.Duration > 0 {
		time.AfterFunc(settings.NodeDelay.Duration, makeNodes)
	} else {
		makeNodes()
	}
	return 0
}

// registerVFIO gives the function its numbers, and its group a device node's number if it is the
// group's first one.
func (b *bus) registerVFIO(d *function) (*vfioDevice, error) {
	bound := &vfioDevice{number: b.vfio.nextDevice, withoutIOMMU: d.IOMMUGroup == nil}
	var err error
	if bound.id, err = layout.VFIODeviceNumber(bound.number); err != nil {
		return nil, err
	}
	b.vfio.nextDevice++
	var name string
	if bound.withoutIOMMU {
		name = fmt.Sprintf("vfio/noiommu-%d", b.vfio.nextNoIOMMU)
		b.vfio.nextNoIOMMU++
	} else {
		name = layout.VFIOGroup(*d.IOMMUGroup)
	}
	group := b.vfio.groups[name]
	if group == nil {
		number, err := layout.VFIOGroupNumber(b.vfio.nextMinor)
		if err != nil {
			return nil, err
		}
		group = &vfioGroup{name: name, number: number}
		b.vfio.nextMinor++
		b.vfio.groups[name] = group
	}
	group.functions++
	bound.group = group
	return bound, nil
}

// makeNodes creates the device nodes of a bound function, unless it was unbound meanwhile.
func (b *bus) makeNodes(d *function, bound *vfioDevice) error {
	if d.vfio != bound {
		return nil
	}
	if b.config.Node.VFIO.Interface != model.VFIOIOMMUFD {
		if err := b.config.MakeVFIONode(bound.group.name, bound.group.number); err != nil {
			return err
		}
	}
	if b.hasDevices() && !bound.withoutIOMMU {
		return b.config.MakeVFIONode(layout.VFIODevice(bound.number), bound.id)
	}
	return nil
}

// hasDevices reports whether functions have device nodes of their own, for iommufd.
func (b *bus) hasDevices() bool { return b.config.Node.VFIO.Interface != model.VFIOLegacy }

// unbindVFIO does what vfio_unregister_group_dev of the kernel does: it removes the function's own
// node, waits for the processes that use the function, and then removes the group's node.
func (b *bus) unbindVFIO(d *function) {
	bound := d.vfio
	b.locked(func() {
		d.leaving = true
		b.removeNode(layout.VFIODevice(bound.number))
	})
	if !b.await(func() bool { return !b.used(bound) }) {
		return
	}
	b.locked(func() {
		if bound.group.functions--; bound.group.functions == 0 {
			delete(b.vfio.groups, bound.group.name)
			b.removeNode(bound.group.name)
		}
		d.driver, d.vfio, d.leaving = "", nil, false
		if d.GPU >= 0 {
			if err := b.state.SetBinding(d.GPU, b.binding(d, "")); err != nil {
				log.Printf("unbind %s: %v", d.Address, err)
			}
		}
	})
}

func (b *bus) removeNode(name string) {
	if err := b.config.RemoveVFIO(name); err != nil {
		log.Printf("remove /dev/%s: %v", name, err)
	}
}

// used reports whether a process has the function's or its group's device node open. No driver is
// behind the nodes, so a process that stands for a virtual machine opens them with O_PATH.
func (b *bus) used(bound *vfioDevice) bool {
	return b.opened(map[uint64]bool{
		unix.Mkdev(bound.id.Major, bound.id.Minor):                     true,
		unix.Mkdev(bound.group.number.Major, bound.group.number.Minor): true,
	})
}

// opened reports whether a process has a device node with one of these numbers open.
func (b *bus) opened(numbers map[uint64]bool) bool {
	if b.config.PlainDevices || len(numbers) == 0 {
		return false
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		folder := filepath.Join("/proc", p.Name(), "fd")
		open, _ := os.ReadDir(folder) // the process may have ended
		for _, descriptor := range open {
			var info unix.Stat_t
			if unix.Stat(filepath.Join(folder, descriptor.Name()), &info) == nil && info.Mode&unix.S_IFMT == unix.S_IFCHR && numbers[info.Rdev] {
				return true
			}
		}
	}
	return false
}
