package layout

import (
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Function is a PCI device function with the values that sysfs shows for it.
type Function struct {
	Address string
	// GPU is the function's number in the state file, or -1.
	GPU int
	// Driver is the kernel driver of a function without a driver_override at boot.
	Driver string
	// IOMMUGroup is nil if the function has none.
	IOMMUGroup *uint32
	// ResetMethod is the content of reset_method, or empty if the kernel cannot reset the function.
	ResetMethod string
	// NoResetMethods means that the kernel has no file reset_method.
	NoResetMethods bool

	root               string
	bridges            []string
	numaNode           int32
	Vendor, Device     uint16
	subVendor, subType uint16
	Class              uint32
	drm                []drmDevice
	// bar1MiB is the size of a GPU's second memory region.
	bar1MiB uint32
	// totalVFs and vfs are the SR-IOV virtual functions. totalVFs 0 means no such capability.
	totalVFs, vfs uint32
}

// classGPU is the PCI class of data-centre GPUs, "3D controller". classBridge is the class of a
// PCI-to-PCI bridge.
const (
	classGPU    = 0x030200
	classBridge = 0x060400
)

// SysPath returns the folder of the node's sysfs tree.
func (c *Config) SysPath() string { return c.path("sys") }

// applySys creates the sysfs files. Unlike /proc/driver, the kernel shows them even while no driver
// is loaded. The sysfs of a node with passthrough is a file system of its own.
func (c *Config) applySys(v view) error {
	if c.Node.Passthrough {
		return os.MkdirAll(c.SysPath(), 0o755)
	}
	t := tree{}
	for _, folder := range []string{"bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups"} {
		t.folder(folder)
	}
	functions, err := c.functions(v)
	if err != nil {
		return err
	}
	for _, function := range functions {
		if strings.HasPrefix(function.Driver, "nvidia") && !v.loaded {
			function.Driver = ""
		}
		if err := function.draw(t); err != nil {
			return err
		}
	}
	if v.loaded {
		for name, content := range c.Modules(v.version) {
			t.file(name, content, 0o444)
		}
	}
	return t.apply(c.SysPath())
}

// AllFunctions returns the functions of the node, bridges first, including cards that are out of
// their slots.
func (c *Config) AllFunctions(f *state.File) ([]Function, error) {
	v := look(f)
	v.loaded = true
	for i := range v.gpus {
		v.gpus[i].present = true
	}
	return c.functions(v)
}

func (c *Config) functions(v view) ([]Function, error) {
	var functions []Function
	for i, card := range c.Node.GPUs {
		gpu := v.gpus[i]
		if !gpu.present {
			continue
		}
		f := Function{
			Address: card.PCI, GPU: i, root: card.PCIRoot, bridges: card.Bridges, numaNode: card.NUMANode, Class: classGPU,
			Vendor: uint16(gpu.pciDevice), Device: uint16(gpu.pciDevice >> 16),
			subVendor: uint16(gpu.pciSubsystem), subType: uint16(gpu.pciSubsystem >> 16), IOMMUGroup: card.IOMMUGroup,
			Driver: card.Driver, totalVFs: card.TotalVFs, vfs: card.VFs, bar1MiB: gpu.bar1MiB,
		}
		if f.Driver == "" {
			f.Driver = model.DriverNVIDIA
		}
		if v.loaded {
			f.drm = c.drmDevices(i)
		}
		f.setReset(card.ResetMethod)
		f.NoResetMethods = c.Node.VFIO.NoResetMethods
		functions = append(functions, f)
	}
	for _, other := range c.Node.Others {
		f := Function{
			Address: other.PCI, GPU: -1, root: other.PCIRoot, bridges: other.Bridges, numaNode: other.NUMANode, Driver: other.Driver,
			IOMMUGroup: other.IOMMUGroup,
		}
		f.setReset(other.ResetMethod)
		f.NoResetMethods = c.Node.VFIO.NoResetMethods
		if err := f.setIDs(other); err != nil {
			return nil, err
		}
		functions = append(functions, f)
	}
	return append(c.bridges(functions), functions...), nil
}

func (f *Function) setReset(method string) {
	if method != model.NoReset {
		f.ResetMethod = method
	}
}

// bridges returns the bridges above the functions.
func (c *Config) bridges(functions []Function) []Function {
	var bridges []Function
	known := map[string]bool{}
	for _, f := range functions {
		for i, address := range f.bridges {
			if known[address] {
				continue
			}
			known[address] = true
			b := Function{
				Address: address, GPU: -1, root: f.root, bridges: f.bridges[:i], numaNode: f.numaNode, Vendor: 0x8086, Device: 0x352a,
				Class: classBridge, Driver: "pcieport",
			}
			if f.GPU >= 0 && c.Node.GPUs[f.GPU].BridgeInGroup && i == len(f.bridges)-1 {
				b.IOMMUGroup = f.IOMMUGroup
			}
			bridges = append(bridges, b)
		}
	}
	return bridges
}

func (f *Function) setIDs(from model.PCIDevice) error {
	for _, field := range []struct {
		text, format string
		to           any
	}{{from.Vendor, "0x%04x", &f.Vendor}, {from.Device, "0x%04x", &f.Device}, {from.Class, "0x%06x", &f.Class}} {
		if n, err := fmt.Sscanf(field.text, "0x%x", field.to); n != 1 || err != nil {
			return fmt.Errorf("PCI device %s: %q is no number such as "+field.format, from.PCI, field.text, 0x10de)
		}
	}
	f.subVendor, f.subType = f.Vendor, f.Device
	return nil
}

// Folder returns the function's path below /sys: the root complex, the bridges, then the function.
func (f Function) Folder() string {
	return path.Join(append(append([]string{"devices", f.root}, f.bridges...), f.Address)...)
}

// Attributes returns the function's files that never change. Those of driver, driver_override and
// VFIO are missing.
func (f Function) Attributes() map[string]string {
	files := map[string]string{
		"vendor":           fmt.Sprintf("0x%04x\n", f.Vendor),
		"device":           fmt.Sprintf("0x%04x\n", f.Device),
		"subsystem_vendor": fmt.Sprintf("0x%04x\n", f.subVendor),
		"subsystem_device": fmt.Sprintf("0x%04x\n", f.subType),
		"class":            fmt.Sprintf("0x%06x\n", f.Class),
		"numa_node":        fmt.Sprintf("%d\n", f.numaNode),
		"enable":           "1\n",
		"modalias": fmt.Sprintf("pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02X\n", f.Vendor, f.Device, f.subVendor, f.subType,
			f.Class>>16, f.Class>>8&0xff, f.Class&0xff),
		"config":   f.configSpace(),
		"resource": f.resource(),
	}
	if f.ResetMethod != "" && !f.NoResetMethods {
		files["reset_method"] = f.ResetMethod + "\n"
	}
	if f.totalVFs > 0 {
		files["sriov_totalvfs"] = fmt.Sprintf("%d\n", f.totalVFs)
		files["sriov_numvfs"] = fmt.Sprintf("%d\n", f.vfs)
	}
	return files
}

// resource returns the memory regions of the function. GPUs have three, with 64-bit addresses, so
// that each takes two lines: registers, frame buffer and more registers. The sizes of the first and
// the last are those of an H100 in lspci. Other functions show none.
func (f Function) resource() string {
	const memory64 = 0x14220c // IORESOURCE_MEM, prefetchable, 64 bits
	var sizes [13]uint64
	if f.GPU >= 0 && f.bar1MiB > 0 {
		sizes[0], sizes[2], sizes[4] = 16<<20, uint64(f.bar1MiB)<<20, 32<<20
	}
	next := uint64(0x20+f.GPU) << 40
	var lines strings.Builder
	for _, size := range sizes {
		if size == 0 {
			lines.WriteString("0x0000000000000000 0x0000000000000000 0x0000000000000000\n")
			continue
		}
		start := (next + size - 1) / size * size // regions are aligned to their size
		fmt.Fprintf(&lines, "0x%016x 0x%016x 0x%016x\n", start, start+size-1, memory64)
		next = start + size
	}
	return lines.String()
}

// DRM returns the files of a GPU's DRM devices, which exist while NVIDIA's driver has the GPU.
func (f Function) DRM() map[string]string {
	files := map[string]string{}
	for _, d := range f.drm {
		files[path.Join("drm", d.name, "dev")] = fmt.Sprintf("%d:%d\n", majorDRM, d.minor)
	}
	return files
}

// DRMNumbers returns the numbers of the GPU's DRM device nodes.
func (f Function) DRMNumbers() map[uint64]bool {
	numbers := map[uint64]bool{}
	for _, d := range f.drm {
		numbers[unix.Mkdev(majorDRM, d.minor)] = true
	}
	return numbers
}

// Modules returns the files of the driver's kernel modules, which exist while they are loaded, by
// their paths below /sys.
func (c *Config) Modules(version string) map[string]string {
	files := map[string]string{"module/nvidia/version": version + "\n"}
	if c.Node.DRMNodes {
		files["module/nvidia_drm/parameters/modeset"] = map[bool]string{true: "Y\n", false: "N\n"}[c.Node.DRMModeset]
	}
	return files
}

// draw adds the function as plain files. A write to them has no effect.
func (f Function) draw(t tree) error {
	folder := f.Folder()
	for name, content := range f.Attributes() {
		t.file(path.Join(folder, name), content, 0o644)
	}
	t.file(path.Join(folder, "driver_override"), "(null)\n", 0o644)
	links := map[string]string{path.Join("bus/pci/devices", f.Address): folder}
	if f.Driver != "" {
		driver := path.Join("bus/pci/drivers", f.Driver)
		t.file(path.Join(driver, "bind"), "", 0o200)
		t.file(path.Join(driver, "unbind"), "", 0o200)
		links[path.Join(folder, "driver")] = driver
		links[path.Join(driver, f.Address)] = folder
	}
	for name, number := range f.DRM() {
		t.file(path.Join(folder, name), number, 0o444)
	}
	if f.IOMMUGroup != nil {
		group := fmt.Sprintf("kernel/iommu_groups/%d", *f.IOMMUGroup)
		links[path.Join(folder, "iommu_group")] = group
		links[path.Join(group, "devices", f.Address)] = folder
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
func (f Function) configSpace() string {
	space := make([]byte, 256)
	binary.LittleEndian.PutUint16(space[0x00:], f.Vendor)
	binary.LittleEndian.PutUint16(space[0x02:], f.Device)
	binary.LittleEndian.PutUint32(space[0x08:], f.Class<<8)
	binary.LittleEndian.PutUint16(space[0x2c:], f.subVendor)
	binary.LittleEndian.PutUint16(space[0x2e:], f.subType)
	return string(space)
}
