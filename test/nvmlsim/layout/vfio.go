package layout

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Numbers of the miscellaneous devices of VFIO. The kernel chooses the minor of iommufd.
const (
	majorMisc   = 10
	minorVFIO   = 196 // VFIO_MINOR of linux/miscdevice.h
	lastMinor   = 1023
	lowestMinor = 256 // dynamic minors that a few drivers use start here
)

// The names of VFIO's device nodes below /dev.
const (
	vfioControl = "vfio/vfio"
	iommuDevice = "iommu"
)

// VFIOGroup returns the name below /dev of an IOMMU group's device node.
func VFIOGroup(group uint32) string { return fmt.Sprintf("vfio/%d", group) }

// VFIODevice returns the name below /dev of the device node of a function that is bound to a VFIO
// driver.
func VFIODevice(number uint32) string { return fmt.Sprintf("vfio/devices/vfio%d", number) }

// VFIONumber is the device number of a device node of VFIO.
type VFIONumber struct{ Major, Minor uint32 }

// MakeVFIOControl creates the device nodes that VFIO has without a bound function.
func (c *Config) MakeVFIOControl() error {
	kernels, err := kernelHasVFIO()
	if err != nil {
		return err
	}
	if kernels && !c.PlainDevices {
		return errors.New("this machine's kernel has VFIO: device nodes made here would reach it; use --plain-devices")
	}
	var failed error
	if c.Node.VFIO.Interface != model.VFIOIOMMUFD {
		failed = c.makeNode(c.Dev, deviceNode{name: vfioControl, major: majorMisc, minor: minorVFIO, mode: 0o666})
	}
	if c.Node.VFIO.Interface != model.VFIOLegacy {
		minor, err := freeMiscMinor()
		if err != nil {
			return err
		}
		failed = errors.Join(failed, c.makeNode(c.Dev, deviceNode{name: iommuDevice, major: majorMisc, minor: minor, mode: 0o660}))
	}
	return failed
}

// VFIOGroupNumber returns the number of the device node of an IOMMU group.
func VFIOGroupNumber(minor uint32) (VFIONumber, error) {
	m, err := chooseMajors()
	return VFIONumber{m.vfio, minor}, err
}

// VFIODeviceNumber returns the number of the device node of a function. number is that of
// [VFIODevice].
func VFIODeviceNumber(number uint32) (VFIONumber, error) {
	m, err := chooseMajors()
	return VFIONumber{m.vfioDevice, number}, err
}

// MakeVFIONode creates the device node of an IOMMU group or a function.
func (c *Config) MakeVFIONode(name string, id VFIONumber) error {
	return c.makeNode(c.Dev, deviceNode{name: name, major: id.Major, minor: id.Minor, mode: 0o600})
}

// RemoveVFIO removes a device node of VFIO.
func (c *Config) RemoveVFIO(name string) error { return removeNode(filepath.Join(c.Dev, name)) }

// endPassthrough unmounts the simulated sysfs, which ends its server and every write that hangs,
// and removes the device nodes of VFIO.
func (c *Config) endPassthrough() error {
	mounted, err := isMountPoint(c.SysPath())
	if err != nil {
		return err
	}
	if mounted {
		if err := unix.Unmount(c.SysPath(), unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", c.SysPath(), err)
		}
	}
	kernels, err := kernelHasVFIO()
	if err != nil || !c.Node.Passthrough || (kernels && !c.PlainDevices) {
		return err
	}
	var failed error
	for _, pattern := range []string{iommuDevice, "vfio/vfio", "vfio/[0-9]*", "vfio/noiommu-*", "vfio/devices/vfio*"} {
		nodes, err := filepath.Glob(filepath.Join(c.Dev, pattern))
		failed = errors.Join(failed, err)
		for _, node := range nodes {
			failed = errors.Join(failed, removeNode(node))
		}
	}
	for _, folder := range []string{"vfio/devices", "vfio"} {
		_ = os.Remove(filepath.Join(c.Dev, folder)) // fails if the folder is missing or not empty
	}
	return failed
}

// miscDevices returns the names of the running kernel's miscellaneous devices, by minor.
func miscDevices() (map[uint32]string, error) {
	file, err := os.Open("/proc/misc")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	used := map[uint32]string{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var minor uint32
		var name string
		if n, _ := fmt.Sscanf(lines.Text(), "%d %s", &minor, &name); n == 2 {
			used[minor] = name
		}
	}
	return used, lines.Err()
}

func freeMiscMinor() (uint32, error) {
	used, err := miscDevices()
	if err != nil {
		return 0, err
	}
	for minor := uint32(lastMinor); minor >= lowestMinor; minor-- {
		if _, taken := used[minor]; !taken {
			return minor, nil
		}
	}
	return 0, errors.New("no free minor of a miscellaneous device")
}

// kernelHasVFIO reports whether the machine's kernel has VFIO. It would answer on device nodes that
// the simulator creates.
func kernelHasVFIO() (bool, error) {
	used, err := miscDevices()
	for _, name := range used {
		if name == "vfio" || name == "iommu" {
			return true, err
		}
	}
	return false, err
}

// ModulesPath returns the folder that stands for the node's /lib/modules.
func (c *Config) ModulesPath() string { return c.path("lib", "modules") }

// applyModules writes the lists of the kernel's modules that name VFIO drivers. A built-in module
// is in modules.builtin and has no alias in modules.alias.
func (c *Config) applyModules(view) error {
	if !c.Node.Passthrough {
		return nil
	}
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		return err
	}
	t := tree{}
	release := unix.ByteSliceToString(kernel.Release[:])
	alias, builtin := "# Aliases extracted from modules themselves.\n", ""
	for _, v := range c.VFIODrivers() {
		if c.Node.VFIO.Module == model.VFIOBuiltin {
			builtin += fmt.Sprintf("kernel/drivers/vfio/pci/%s.ko\n", v.Name)
			continue
		}
		alias += fmt.Sprintf("alias %s %s\n", v.alias(), v.Module)
	}
	t.file(path.Join(release, "modules.alias"), alias, 0o644)
	t.file(path.Join(release, "modules.builtin"), builtin, 0o644)
	return t.apply(c.ModulesPath())
}

// VFIODriver is a driver that binds functions for passthrough, and its module.
type VFIODriver struct {
	Name, Module string
	// Vendor and Device are the IDs that it is for, or empty for every device.
	Vendor, Device string
}

// VFIODrivers returns the VFIO drivers that the node's kernel has or can load.
func (c *Config) VFIODrivers() []VFIODriver {
	if !c.Node.Passthrough || c.Node.VFIO.Module == model.VFIOMissing {
		return nil
	}
	drivers := []VFIODriver{{Name: model.DriverVFIO, Module: "vfio_pci"}}
	for _, v := range c.Node.VFIO.Variants {
		drivers = append(drivers, VFIODriver{v.Driver, v.Module, v.Vendor, v.Device})
	}
	return drivers
}

// alias returns the driver's alias as modules.alias has it.
func (v VFIODriver) alias() string {
	if v.Vendor == "" {
		return "vfio_pci:v*d*sv*sd*bc*sc*i*"
	}
	var vendor, device uint32
	_, _ = fmt.Sscanf(v.Vendor+" "+v.Device, "0x%x 0x%x", &vendor, &device) // model has checked them
	return fmt.Sprintf("vfio_pci:v%08Xd%08Xsv*sd*bc*sc*i*", vendor, device)
}
