package vfio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	nvidiaVendor = 0x10de
	// classBridge is the class of PCI bridges. A group may contain them, whatever their driver.
	classBridge = 0x0604
	// baseDisplay is the base class of display controllers, which all GPUs are.
	baseDisplay = 0x03
	// noOverride is what the kernel shows for a function without driver_override.
	noOverride = "(null)"
	// unlistedReset stands for the reset methods of a kernel that does not list them.
	unlistedReset = "unlisted"
)

// Function is one PCI function.
type Function struct {
	Address device.PCIAddress
	// Class is the class without the programming interface: 0x0302 for a GPU without a display.
	Class          uint16
	Vendor, Device uint16
	// Driver is the kernel driver that the function is bound to, or "".
	Driver string
	// Override is the only driver that may bind to the function, or "" if any may.
	Override string
	// ModAlias is what the function's drivers are found by: "pci:v000010DEd00002330sv…".
	ModAlias string
}

// Bound reports whether a VFIO driver has the function: vfio-pci, or a variant of it such as
// nvgrace_gpu_vfio_pci.
func (f Function) Bound() bool {
	name := strings.ReplaceAll(f.Driver, "_", "-")
	return strings.HasSuffix(name, "vfio-pci")
}

// IsDisplay reports whether the function is a GPU or another display controller.
func (f Function) IsDisplay() bool { return f.Class>>8 == baseDisplay }

// Group is a GPU with what VFIO needs to know about it.
type Group struct {
	GPU Function
	// Number is the IOMMU group, or -1 without one.
	Number int
	// NoIOMMU means that the group is a fake of VFIO's unsafe mode, which isolates nothing.
	NoIOMMU bool
	// Companions are the other functions of the GPU's slot and of its group, without bridges. They
	// must be bound to VFIO with the GPU.
	Companions []Function
	// ResetMethods are the ways in which the kernel can reset the GPU between two users. For a kernel
	// before 5.15, which lists none, it has unlistedReset if the kernel can.
	ResetMethods []string
	// VirtualFunctions is how many SR-IOV functions of the GPU are enabled. IsVirtual means that the
	// GPU is one of them.
	VirtualFunctions int
	IsVirtual        bool
	// Modeset means that NVIDIA's module nvidia_drm has modeset on. NVIDIADriver is that driver's
	// version, or "" if it is unknown or not loaded.
	Modeset      bool
	NVIDIADriver string
}

// Read reads the group of the GPU at the address. sysfs is where sysfs is mounted.
func Read(sysfs string, gpu device.PCIAddress) (Group, error) {
	dir := directory{path: filepath.Join(sysfs, "bus/pci/devices", string(gpu))}
	g := Group{Number: -1}
	var err error
	if g.GPU, err = readFunction(sysfs, gpu); err != nil {
		return g, err
	}
	group, err := filepath.EvalSymlinks(filepath.Join(dir.path, "iommu_group"))
	if err == nil {
		inGroup := directory{path: group}
		g.NoIOMMU = inGroup.text("name") == "vfio-noiommu"
		g.Number, err = strconv.Atoi(filepath.Base(group))
		err = errors.Join(err, inGroup.err)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return g, fmt.Errorf("read the IOMMU group of %s: %w", gpu, err)
	}
	if g.Companions, err = companions(sysfs, gpu, group); err != nil {
		return g, fmt.Errorf("read the companions of %s: %w", gpu, err)
	}
	if g.ResetMethods = strings.Fields(dir.text("reset_method")); !dir.has("reset_method") && dir.has("reset") {
		g.ResetMethods = []string{unlistedReset}
	}
	if dir.text("sriov_numvfs") != "" { // else the GPU cannot have any
		g.VirtualFunctions = dir.number("sriov_numvfs")
	}
	if dir.err != nil {
		return g, fmt.Errorf("read the reset methods and virtual functions of %s: %w", gpu, dir.err)
	}
	if _, err := os.Lstat(filepath.Join(dir.path, "physfn")); err == nil {
		g.IsVirtual = true
	}
	modules := directory{path: filepath.Join(sysfs, "module")}
	g.Modeset = modules.text("nvidia_drm/parameters/modeset") == "Y"
	g.NVIDIADriver = modules.text("nvidia/version")
	if modules.err != nil {
		return g, fmt.Errorf("read the parameters of NVIDIA's modules: %w", modules.err)
	}
	return g, nil
}

// companions reads the other functions of the slot, and of the group in the directory group, which
// is empty without one.
func companions(sysfs string, gpu device.PCIAddress, group string) ([]Function, error) {
	members, err := os.ReadDir(filepath.Join(sysfs, "bus/pci/devices"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, m := range members {
		if sameSlot(m.Name(), string(gpu)) {
			names = append(names, m.Name())
		}
	}
	if group != "" {
		inGroup, err := os.ReadDir(filepath.Join(group, "devices"))
		if err != nil {
			return nil, err
		}
		for _, m := range inGroup {
			names = append(names, m.Name())
		}
	}
	slices.Sort(names)
	var all []Function
	for _, name := range slices.Compact(names) {
		if name == string(gpu) {
			continue
		}
		f, err := readFunction(sysfs, device.PCIAddress(name))
		if err != nil {
			return nil, err
		}
		if f.Class != classBridge {
			all = append(all, f)
		}
	}
	return all, nil
}

// sameSlot reports whether two addresses differ at most in the function, the digit after the point.
func sameSlot(a, b string) bool {
	slotA, _, _ := strings.Cut(a, ".")
	slotB, _, _ := strings.Cut(b, ".")
	return slotA == slotB
}

func readFunction(sysfs string, address device.PCIAddress) (Function, error) {
	dir := directory{path: filepath.Join(sysfs, "bus/pci/devices", string(address))}
	f := Function{
		//nolint:gosec // sysfs has at most 24 bits of class and 16 of the others
		Address: address, Class: uint16(dir.number("class") >> 8), Vendor: uint16(dir.number("vendor")), Device: uint16(dir.number("device")),
		Override: dir.text("driver_override"), ModAlias: dir.text("modalias"),
	}
	driver, err := os.Readlink(filepath.Join(dir.path, "driver"))
	if dir.keep(err); err == nil {
		f.Driver = filepath.Base(driver)
	}
	if f.Override == noOverride {
		f.Override = ""
	}
	if dir.err != nil {
		return f, fmt.Errorf("read PCI function %s: %w", address, dir.err)
	}
	return f, nil
}

// directory reads the files of a directory of sysfs, and keeps the first error.
type directory struct {
	path string
	err  error
}

// has reports whether the kernel has such a file.
func (d *directory) has(name string) bool {
	_, err := os.Lstat(filepath.Join(d.path, name))
	return err == nil
}

// text returns a file's content without the line's end, or "" if the kernel has no such file.
func (d *directory) text(name string) string {
	data, err := os.ReadFile(filepath.Join(d.path, name))
	d.keep(err)
	return strings.TrimSpace(string(data))
}

// number returns the number in a file, which must exist.
func (d *directory) number(name string) int {
	s := d.text(name)
	n, err := strconv.ParseInt(s, 0, 32)
	if s == "" {
		err = errors.New("the file is missing")
	}
	if err != nil {
		d.keep(fmt.Errorf("%s: %w", name, err))
	}
	return int(n)
}

// keep keeps the error of reading a file, unless the kernel has no such file.
func (d *directory) keep(err error) {
	if d.err == nil && !errors.Is(err, fs.ErrNotExist) {
		d.err = err
	}
}
