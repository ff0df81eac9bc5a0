package layout

import (
	"encoding/binary"
	"fmt"
	"path"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// pciFunction is a PCI device function with the values that sysfs shows for it.
type pciFunction struct {
	address            string
	root               string
	bridges            []string
	numaNode           int32
	vendor, device     uint16
	subVendor, subType uint16
	class              uint32
	driver             string
	iommuGroup         *uint32
	drm                []drmDevice
}

// classGPU is the PCI class of data-centre GPUs, "3D controller". classBridge is the class of a
// PCI-to-PCI bridge.
const (
	classGPU    = 0x030200
	classBridge = 0x060400
)

// applySys creates the sysfs files. Unlike /proc/driver, the kernel shows them even while no driver
// is loaded.
func (c *Config) applySys(v view) error {
	t := tree{}
	for _, folder := range []string{"bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups"} {
		t.folder(folder)
	}
	functions, err := c.functions(v)
	if err != nil {
		return err
	}
	for _, function := range functions {
		if err := function.draw(t); err != nil {
			return err
		}
	}
	return t.apply(c.path("sys"))
}

func (c *Config) functions(v view) ([]pciFunction, error) {
	var functions []pciFunction
	for i, card := range c.Node.GPUs {
		gpu := v.gpus[i]
		if !gpu.present {
			continue
		}
		f := pciFunction{
			address: card.PCI, root: card.PCIRoot, bridges: card.Bridges, numaNode: card.NUMANode, class: classGPU,
			vendor: uint16(gpu.pciDevice), device: uint16(gpu.pciDevice >> 16),
			subVendor: uint16(gpu.pciSubsystem), subType: uint16(gpu.pciSubsystem >> 16), iommuGroup: card.IOMMUGroup,
		}
		if v.loaded {
			f.driver = "nvidia"
			f.drm = c.drmDevices(i)
		}
		functions = append(functions, f)
	}
	for _, other := range c.Node.Others {
		f := pciFunction{address: other.PCI, root: other.PCIRoot, bridges: other.Bridges, numaNode: other.NUMANode, driver: other.Driver}
		if err := f.setIDs(other); err != nil {
			return nil, err
		}
		if strings.HasPrefix(f.driver, "nvidia") && !v.loaded {
			f.driver = ""
		}
		functions = append(functions, f)
	}
	return functions, nil
}

func (f *pciFunction) setIDs(from model.PCIDevice) error {
	for _, field := range []struct {
		text, format string
		to           any
	}{{from.Vendor, "0x%04x", &f.vendor}, {from.Device, "0x%04x", &f.device}, {from.Class, "0x%06x", &f.class}} {
		if n, err := fmt.Sscanf(field.text, "0x%x", field.to); n != 1 || err != nil {
			return fmt.Errorf("PCI device %s: %q is no number such as "+field.format, from.PCI, field.text, 0x10de)
		}
	}
	f.subVendor, f.subType = f.vendor, f.device
	return nil
}

// folder returns the device's path below sys/devices: the root complex, the bridges, then the
// device.
func (f pciFunction) folder() string {
	return path.Join(append(append([]string{"devices", f.root}, f.bridges...), f.address)...)
}

func (f pciFunction) draw(t tree) error {
	above := path.Join("devices", f.root)
	for _, bridge := range f.bridges {
		above = path.Join(above, bridge)
		b := pciFunction{address: bridge, numaNode: f.numaNode, vendor: 0x8086, device: 0x352a, class: classBridge, driver: "pcieport"}
		if err := b.drawAt(t, above); err != nil {
			return err
		}
	}
	return f.drawAt(t, f.folder())
}

func (f pciFunction) drawAt(t tree, folder string) error {
	files := map[string]string{
		"vendor":           fmt.Sprintf("0x%04x\n", f.vendor),
		"device":           fmt.Sprintf("0x%04x\n", f.device),
		"subsystem_vendor": fmt.Sprintf("0x%04x\n", f.subVendor),
		"subsystem_device": fmt.Sprintf("0x%04x\n", f.subType),
		"class":            fmt.Sprintf("0x%06x\n", f.class),
		"numa_node":        fmt.Sprintf("%d\n", f.numaNode),
		"driver_override":  "(null)\n",
		"enable":           "1\n",
		"modalias": fmt.Sprintf("pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02X\n", f.vendor, f.device, f.subVendor, f.subType,
			f.class>>16, f.class>>8&0xff, f.class&0xff),
		"config":   f.configSpace(),
		"resource": strings.Repeat("0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 13),
	}
	for name, content := range files {
		t.file(path.Join(folder, name), content, 0o644)
	}
	links := map[string]string{path.Join("bus/pci/devices", f.address): folder}
	if f.driver != "" {
		driver := path.Join("bus/pci/drivers", f.driver)
		t.file(path.Join(driver, "bind"), "", 0o200)
		t.file(path.Join(driver, "unbind"), "", 0o200)
		links[path.Join(folder, "driver")] = driver
		links[path.Join(driver, f.address)] = folder
	}
	for _, d := range f.drm {
		t.file(path.Join(folder, "drm", d.name, "dev"), fmt.Sprintf("%d:%d\n", majorDRM, d.minor), 0o444)
	}
	if f.iommuGroup != nil {
		group := fmt.Sprintf("kernel/iommu_groups/%d", *f.iommuGroup)
		links[path.Join(folder, "iommu_group")] = group
		links[path.Join(group, "devices", f.address)] = folder
	}
	for at, to := range links {
		if err := t.symlink(at, to); err != nil {
			return err
		}
	}
	return nil
}

// configSpace returns the start of the device's PCI configuration space: IDs and class are set, and
// all other bytes are zero.
func (f pciFunction) configSpace() string {
	space := make([]byte, 256)
	binary.LittleEndian.PutUint16(space[0x00:], f.vendor)
	binary.LittleEndian.PutUint16(space[0x02:], f.device)
	binary.LittleEndian.PutUint32(space[0x08:], f.class<<8)
	binary.LittleEndian.PutUint16(space[0x2c:], f.subVendor)
	binary.LittleEndian.PutUint16(space[0x2e:], f.subType)
	return string(space)
}
