package vfio

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Binding says how a PCI function was bound before [Bind], and to which VFIO driver Bind binds it.
// It has all that [Release] needs.
type Binding struct {
	Address device.PCIAddress `json:"address"`
	// Driver and Override are what the function had. Both may be empty.
	Driver   string `json:"driver,omitempty"`
	Override string `json:"override,omitempty"`
	VFIO     string `json:"vfio"`
}

// Found is how a GPU was before it was bound to a VFIO driver.
type Found struct {
	// Functions are the GPU's companions and, last, the GPU.
	Functions []Binding `json:"functions"`
	// Persistence is true if NVIDIA's driver had persistence mode on, or nvidia-persistenced kept the
	// GPU open instead.
	Persistence bool `json:"persistence,omitempty"`
}

// Bindings returns the bindings of the group's functions: companions first, the GPU last. The GPU
// gets the driver that fits it best, of those in modules.alias, and companions get plain vfio-pci.
// A function that a VFIO driver already has keeps that driver. modules is where the caller sees the
// host's /lib/modules. The error says which kernel module is not loaded.
func (g Group) Bindings(sysfs, modules string) ([]Binding, error) {
	aliases, err := modulesAlias(modules)
	if err != nil {
		return nil, err
	}
	best, err := Module(aliases, g.GPU)
	if err != nil {
		return nil, err
	}
	var list []Binding
	for _, f := range append(slices.Clone(g.Companions), g.GPU) {
		b := Binding{Address: f.Address, Driver: f.Driver, Override: f.Override, VFIO: f.Driver}
		if !f.Bound() {
			module := plainModule
			if f.Address == g.GPU.Address {
				module = best
			}
			if b.VFIO, err = driverOf(sysfs, module); err != nil {
				return nil, err
			}
		}
		list = append(list, b)
	}
	return list, nil
}

// Bind binds each function to its VFIO driver, in order. It may be called again after it was
// interrupted. Before it takes a function from a driver, it calls idle, which returns an error if a
// process uses the function. It begins no write after ctx has ended.
func Bind(ctx context.Context, bus Bus, list []Binding, idle func(Binding) error) error {
	for _, b := range list {
		if err := b.bind(ctx, bus, idle); err != nil {
			return fmt.Errorf("bind PCI function %s to %s: %w", b.Address, b.VFIO, err)
		}
	}
	return nil
}

func (b Binding) bind(ctx context.Context, bus Bus, idle func(Binding) error) error {
	driver, override, err := bus.Driver(b.Address)
	if err != nil || driver == b.VFIO {
		return err
	}
	if override != b.VFIO {
		if err := unlessEnded(ctx, func() error { return bus.SetOverride(b.Address, b.VFIO) }); err != nil {
			return err
		}
	}
	if driver != "" {
		if err := idle(b); err != nil {
			return err
		}
		if err := unlessEnded(ctx, func() error { return bus.Unbind(b.Address, driver) }); err != nil {
			return err
		}
	}
	if err := unlessEnded(ctx, func() error { return bus.Probe(b.Address) }); err != nil {
		return err
	}
	// The kernel reports success even if no driver takes the function.
	switch driver, _, err = bus.Driver(b.Address); {
	case err != nil:
		return err
	case driver == "":
		return errors.New("the driver did not take it: check dmesg")
	case driver != b.VFIO:
		return fmt.Errorf("driver %s has it", driver)
	}
	return nil
}

// Release undoes [Bind], in reverse order: it takes each function from VFIO, restores its override,
// and offers it to the drivers that the kernel has now. So a driver that was loaded meanwhile gets
// the GPU, and one that is loaded later takes it then. A companion that had no driver gets none,
// and a function whose own override names VFIO stays there.
//
// Release may be called again after it was interrupted, and after Bind ran in part or not at all.
// It leaves alone what an admin has changed since, and display controllers other than the GPU,
// which another claim may have.
func Release(ctx context.Context, bus Bus, list []Binding, idle func(Binding) error) error {
	for i, b := range slices.Backward(list) {
		isGPU := i == len(list)-1
		var otherGPU bool
		var err error
		if !isGPU {
			otherGPU, err = bus.IsDisplay(b.Address)
		}
		if err == nil && !otherGPU {
			err = b.release(ctx, bus, isGPU, idle)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a function that left the bus is released
			return fmt.Errorf("give PCI function %s back to its driver: %w", b.Address, err)
		}
	}
	return nil
}

func (b Binding) release(ctx context.Context, bus Bus, isGPU bool, idle func(Binding) error) error {
	if b.Driver == b.VFIO {
		return nil // Bind left it alone
	}
	driver, override, err := bus.Driver(b.Address)
	if err != nil {
		return err
	}
	last := b.Driver // what it must have in the end, if the kernel has that driver
	if b.Override == b.VFIO {
		last = b.VFIO
	}
	if driver == b.VFIO && driver != last {
		if err := idle(b); err != nil {
			return err
		}
		if err := unlessEnded(ctx, func() error { return bus.Unbind(b.Address, driver) }); err != nil {
			return err
		}
		driver = ""
	}
	if override == b.VFIO && override != b.Override {
		if err := unlessEnded(ctx, func() error { return bus.SetOverride(b.Address, b.Override) }); err != nil {
			return err
		}
	}
	// NVIDIA's driver may have been loaded since Bind. That took no GPU from VFIO.
	if driver == "" && (isGPU || b.Driver != "") {
		if err := unlessEnded(ctx, func() error { return bus.Probe(b.Address) }); err != nil {
			return err
		}
	}
	switch driver, override, err = bus.Driver(b.Address); {
	case err != nil:
		return err
	case driver == b.VFIO && driver != last:
		return fmt.Errorf("driver %s still has it", driver)
	case override == b.VFIO && override != b.Override:
		return fmt.Errorf("its driver override is still %s", override)
	case driver == "" && last != "" && bus.HasDriver(last):
		return fmt.Errorf("driver %s did not take it back: check dmesg", last)
	}
	return nil
}

func unlessEnded(ctx context.Context, write func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return write()
}
