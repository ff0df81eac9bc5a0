package vfio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Bus is the kernel's PCI bus. [Sysfs] is the one of this machine.
type Bus interface {
	// Driver returns the driver that has the function, and the function's driver override. Both may be
	// empty. The error wraps [fs.ErrNotExist] if the function is not on the bus.
	Driver(function device.PCIAddress) (driver, override string, err error)
	// IsDisplay reports whether the function is a GPU or another display controller. The error is as
	// that of Driver.
	IsDisplay(function device.PCIAddress) (bool, error)
	// HasDriver reports whether the kernel has a driver of this name now.
	HasDriver(name string) bool
	// SetOverride restricts the function to one driver. An empty name lifts the restriction.
	SetOverride(function device.PCIAddress, driver string) error
	// Unbind takes the function from its driver. It returns when the driver lets go, which may be
	// never while a process uses the function.
	Unbind(function device.PCIAddress, driver string) error
	// Probe offers a function without driver to the drivers. It succeeds even if none takes it.
	Probe(function device.PCIAddress) error
}

// Sysfs is the [Bus] of the machine whose sysfs is mounted at this path. While a write about a
// function hangs, every other call about the function may hang too.
type Sysfs string

var _ Bus = Sysfs("")

// Driver implements [Bus].
func (s Sysfs) Driver(function device.PCIAddress) (driver, override string, err error) {
	dir := s.path("devices", string(function))
	raw, err := os.ReadFile(filepath.Join(dir, "driver_override"))
	if err != nil {
		return "", "", err
	}
	if override = strings.TrimSpace(string(raw)); override == noOverride {
		override = ""
	}
	target, err := os.Readlink(filepath.Join(dir, "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", override, nil
	}
	return filepath.Base(target), override, err
}

// IsDisplay implements [Bus].
func (s Sysfs) IsDisplay(function device.PCIAddress) (bool, error) {
	raw, err := os.ReadFile(s.path("devices", string(function), "class"))
	return strings.HasPrefix(string(raw), "0x03"), err
}

// HasDriver implements [Bus].
func (s Sysfs) HasDriver(name string) bool {
	_, err := os.Stat(s.path("drivers", name))
	return err == nil
}

// SetOverride implements [Bus].
func (s Sysfs) SetOverride(function device.PCIAddress, driver string) error {
	return write(s.path("devices", string(function), "driver_override"), driver+"\n")
}

// Unbind implements [Bus].
func (s Sysfs) Unbind(function device.PCIAddress, driver string) error {
	return write(s.path("drivers", driver, "unbind"), string(function))
}

// Probe implements [Bus].
func (s Sysfs) Probe(function device.PCIAddress) error {
	return write(s.path("drivers_probe"), string(function))
}

func (s Sysfs) path(parts ...string) string {
	return filepath.Join(append([]string{string(s), "bus/pci"}, parts...)...)
}

// write writes one text to a file that exists, in one call, as sysfs needs it.
func write(path, text string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}

// driverOf returns the name of the PCI driver that a loaded kernel module provides. It may differ
// from the module's name by a dash for an underscore.
func driverOf(sysfs, module string) (string, error) {
	links, err := filepath.Glob(filepath.Join(sysfs, "module", module, "drivers", "pci:*"))
	if err != nil {
		return "", err
	}
	if len(links) == 0 {
		return "", fmt.Errorf("kernel module %s is not loaded: load it on the host (modprobe %s), and at each boot (/etc/modules-load.d)",
			module, module)
	}
	return strings.TrimPrefix(filepath.Base(links[0]), "pci:"), nil
}
