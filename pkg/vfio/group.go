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
	// noOverride is what the kernel shows for a function without driver_override.
	noOverride = "(null)"
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
	// ResetMethods are the ways in which the kernel can reset the GPU between two users.
	ResetMethods []string
	// VirtualFunctions is how many SR-IOV functions of the GPU are enabled. IsVirtual means that the
	// GPU is one of them.
	VirtualFunctions int
	IsVirtual        bool
	// NUMANode is nil if the platform reports none.
	NUMANode *int
}

// Read reads the group of the GPU at the address. sysfs is where sysfs is mounted.
func Read(sysfs string, gpu device.PCIAddress) (Group, error) {
	dir := filepath.Join(sysfs, "bus/pci/devices", string(gpu))
	g := Group{Number: -1}
	var err error
	if g.GPU, err = readFunction(sysfs, gpu); err != nil {
		return g, err
	}
	group, err := filepath.EvalSymlinks(filepath.Join(dir, "iommu_group"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return g, fmt.Errorf("read the IOMMU group of %s: %w", gpu, err)
	default:
		if g.Number, err = strconv.Atoi(filepath.Base(group)); err != nil {
			return g, fmt.Errorf("read the IOMMU group of %s: %w", gpu, err)
		}
		name, err := text(group, "name")
		if err != nil {
			return g, fmt.Errorf("read the IOMMU group of %s: %w", gpu, err)
		}
		g.NoIOMMU = name == "vfio-noiommu"
	}
	if g.Companions, err = companions(sysfs, gpu, group); err != nil {
		return g, fmt.Errorf("read the companions of %s: %w", gpu, err)
	}
	methods, err := text(dir, "reset_method")
	if err != nil {
		return g, fmt.Errorf("read how %s can be reset: %w", gpu, err)
	}
	g.ResetMethods = strings.Fields(methods)
	if g.VirtualFunctions, err = number(dir, "sriov_numvfs", 0); err != nil {
		return g, fmt.Errorf("read the virtual functions of %s: %w", gpu, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "physfn")); err == nil {
		g.IsVirtual = true
	}
	node, err := number(dir, "numa_node", -1)
	if err != nil {
		return g, fmt.Errorf("read the NUMA node of %s: %w", gpu, err)
	}
	if node >= 0 {
		g.NUMANode = &node
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
	dir := filepath.Join(sysfs, "bus/pci/devices", string(address))
	f := Function{Address: address}
	var numbers [3]int
	for i, name := range []string{"class", "vendor", "device"} {
		var err error
		if numbers[i], err = number(dir, name, -1); err == nil && numbers[i] < 0 {
			err = fs.ErrNotExist
		}
		if err != nil {
			return f, fmt.Errorf("read %s of PCI function %s: %w", name, address, err)
		}
	}
	//nolint:gosec // sysfs has at most 24 bits of class and 16 of the others
	f.Class, f.Vendor, f.Device = uint16(numbers[0]>>8), uint16(numbers[1]), uint16(numbers[2])
	driver, err := os.Readlink(filepath.Join(dir, "driver"))
	if err == nil {
		f.Driver = filepath.Base(driver)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return f, fmt.Errorf("read the driver of PCI function %s: %w", address, err)
	}
	if f.Override, err = text(dir, "driver_override"); err != nil {
		return f, fmt.Errorf("read the driver override of PCI function %s: %w", address, err)
	}
	if f.Override == noOverride {
		f.Override = ""
	}
	if f.ModAlias, err = text(dir, "modalias"); err != nil {
		return f, fmt.Errorf("read the alias of PCI function %s: %w", address, err)
	}
	return f, nil
}

// text returns a file's content without the line's end, or "" if the kernel has no such file.
func text(dir, name string) (string, error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(data)), err
}

// number returns the number in a file, or missing if the kernel has no such file.
func number(dir, name string, missing int) (int, error) {
	s, err := text(dir, name)
	if err != nil || s == "" {
		return missing, err
	}
	n, err := strconv.ParseInt(s, 0, 32)
	return int(n), err
}
