// Package busmodel is a PCI bus in memory, for tests that need no simulated sysfs. It follows the
// rules of the kernel's driver core as package test/nvmlsim/sysfs does, but no write hangs.
package busmodel

import (
	"cmp"
	"io/fs"
	"slices"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// Function is a PCI function. A test may read and set every field, as an admin does.
type Function struct {
	Address          device.PCIAddress
	Driver, Override string
	// Display means that the function is a GPU or another display controller.
	Display bool
	// Group is the function's IOMMU group. Functions without one have a group for each slot.
	Group int
	// Native is the driver that takes the function without an override.
	Native string
	// Used means that a process has the function open.
	Used bool
}

// Op is a kind of write.
type Op string

// The kinds of writes.
const (
	Override Op = "set driver override"
	Unbind   Op = "unbind driver"
	Probe    Op = "probe drivers"
)

// Bus implements [vfio.Bus].
type Bus struct {
	Functions []*Function
	// Drivers are the names of the drivers that the kernel has.
	Drivers []string
	// Write makes each write, by calling effect. It may fail the write, before or after its effect.
	Write func(op Op, effect func() error) error
}

var _ vfio.Bus = &Bus{}

func (b *Bus) find(address device.PCIAddress) *Function {
	i := slices.IndexFunc(b.Functions, func(f *Function) bool { return f.Address == address })
	if i < 0 {
		return nil
	}
	return b.Functions[i]
}

// Driver implements [vfio.Bus].
func (b *Bus) Driver(address device.PCIAddress) (driver, override string, err error) {
	f := b.find(address)
	if f == nil {
		return "", "", fs.ErrNotExist
	}
	return f.Driver, f.Override, nil
}

// IsDisplay implements [vfio.Bus].
func (b *Bus) IsDisplay(address device.PCIAddress) (bool, error) {
	f := b.find(address)
	if f == nil {
		return false, fs.ErrNotExist
	}
	return f.Display, nil
}

// HasDriver implements [vfio.Bus].
func (b *Bus) HasDriver(name string) bool { return slices.Contains(b.Drivers, name) }

// Load loads a driver. It takes the functions that no driver has and that it matches, and none from
// another driver.
func (b *Bus) Load(driver string) {
	b.Drivers = append(b.Drivers, driver)
	for _, f := range b.Functions {
		if f.Driver == "" && f.wanted() == driver {
			f.Driver = driver
		}
	}
}

// Unload unloads a driver. Its functions then have no driver.
func (b *Bus) Unload(driver string) {
	b.Drivers = slices.DeleteFunc(b.Drivers, func(d string) bool { return d == driver })
	for _, f := range b.Functions {
		if f.Driver == driver {
			f.Driver = ""
		}
	}
}

// wanted is the only driver that matches the function. An override decides alone.
func (f *Function) wanted() string { return cmp.Or(f.Override, f.Native) }

// SetOverride implements [vfio.Bus].
func (b *Bus) SetOverride(address device.PCIAddress, driver string) error {
	return b.write(Override, address, func(f *Function) error { f.Override = driver; return nil })
}

// Unbind implements [vfio.Bus].
func (b *Bus) Unbind(address device.PCIAddress, driver string) error {
	return b.write(Unbind, address, func(f *Function) error {
		if f.Driver != driver {
			return syscall.ENODEV
		}
		f.Driver = ""
		return nil
	})
}

// Probe implements [vfio.Bus].
func (b *Bus) Probe(address device.PCIAddress) error {
	return b.write(Probe, address, func(f *Function) error {
		if f.Driver == "" && b.HasDriver(f.wanted()) {
			f.Driver = f.wanted()
		}
		return nil
	})
}

func (b *Bus) write(op Op, address device.PCIAddress, effect func(*Function) error) error {
	f := b.find(address)
	if f == nil {
		return fs.ErrNotExist
	}
	if b.Write == nil {
		return effect(f)
	}
	return b.Write(op, func() error { return effect(f) })
}
