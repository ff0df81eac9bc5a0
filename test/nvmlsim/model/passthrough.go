package model

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// VFIO describes what a node's kernel offers for passthrough. It has an effect only on a node with
// Passthrough.
type VFIO struct {
	// Module says how the kernel has vfio-pci: loaded (the default), builtin, unloaded or missing.
	Module string `json:"module,omitempty"`
	// Interface says which device nodes a bound function gets: both (the default), legacy
	// (/dev/vfio/GROUP only) or iommufd (/dev/vfio/devices/vfioN only).
	Interface string `json:"interface,omitempty"`
	// NodeDelay is how long after a bind its device nodes appear.
	NodeDelay metav1.Duration `json:"nodeDelay,omitzero"`
	// Variants are VFIO drivers for particular devices, such as nvgrace-gpu-vfio-pci.
	Variants []VFIOVariant `json:"variants,omitempty"`
	// NoResetMethods leaves out the files reset_method, as kernels before 5.15 do.
	NoResetMethods bool `json:"noResetMethods,omitempty"`
	// NoIOMMU says that the machine's IOMMU is off: no function has a group. UnsafeNoIOMMU is the
	// parameter of the module vfio that permits binding then.
	NoIOMMU       bool `json:"noIOMMU,omitempty"`
	UnsafeNoIOMMU bool `json:"unsafeNoIOMMU,omitempty"`
}

// VFIOVariant is a VFIO driver that modules.alias names for one kind of device.
type VFIOVariant struct {
	Driver string `json:"driver"`
	Module string `json:"module"`
	// Vendor and Device are IDs such as 0x10de.
	Vendor string `json:"vendor"`
	Device string `json:"device"`
}

// The values of VFIO.Module.
const (
	VFIOLoaded   = "loaded"
	VFIOBuiltin  = "builtin"
	VFIOUnloaded = "unloaded"
	VFIOMissing  = "missing"
)

// The values of VFIO.Interface.
const (
	VFIOBoth    = "both"
	VFIOLegacy  = "legacy"
	VFIOIOMMUFD = "iommufd"
)

// The names of two kernel drivers.
const (
	DriverNVIDIA = "nvidia"
	DriverVFIO   = "vfio-pci"
)

// NoReset as a function's ResetMethod means that the kernel cannot reset the function.
const NoReset = "none"

// defaultReset is the reset_method of a function whose node file gives none.
const defaultReset = "flr bus"

// firstGroup is the number of the first IOMMU group that completePassthrough gives out.
const firstGroup = 10

// completePassthrough checks the fields about passthrough and fills in their defaults. Functions of
// one slot share an IOMMU group, because without access control services they can reach each other.
func (n *Node) completePassthrough() error {
	if n.VFIO.Module == "" {
		n.VFIO.Module = VFIOLoaded
	}
	if n.VFIO.Interface == "" {
		n.VFIO.Interface = VFIOBoth
	}
	if known := []string{VFIOLoaded, VFIOBuiltin, VFIOUnloaded, VFIOMissing}; !slices.Contains(known, n.VFIO.Module) {
		return fmt.Errorf("vfio.module is %q: want one of %q", n.VFIO.Module, known)
	}
	if known := []string{VFIOBoth, VFIOLegacy, VFIOIOMMUFD}; !slices.Contains(known, n.VFIO.Interface) {
		return fmt.Errorf("vfio.interface is %q: want one of %q", n.VFIO.Interface, known)
	}
	for _, v := range n.VFIO.Variants {
		var vendor, device uint32
		if c, err := fmt.Sscanf(v.Vendor+" "+v.Device, "0x%x 0x%x", &vendor, &device); c != 2 || err != nil || v.Driver == "" || v.Module == "" {
			return fmt.Errorf("vfio.variants: %+v needs a driver, a module, and a vendor and device such as 0x10de", v)
		}
	}
	if !n.Passthrough {
		for _, card := range n.GPUs {
			if card.Driver != "" {
				return fmt.Errorf("GPU at %s has the driver %s: that needs passthrough: true", card.PCI, card.Driver)
			}
		}
		return nil
	}
	for i := range n.GPUs {
		if n.GPUs[i].ResetMethod == "" {
			n.GPUs[i].ResetMethod = defaultReset
		}
	}
	for i := range n.Others {
		if n.Others[i].ResetMethod == "" {
			n.Others[i].ResetMethod = defaultReset
		}
	}
	if !n.VFIO.NoIOMMU {
		n.giveGroups()
	}
	return nil
}

// giveGroups gives an IOMMU group to every function whose node file names none.
func (n *Node) giveGroups() {
	used := map[uint32]bool{}
	bySlot := map[string]*uint32{}
	note := func(pci string, group *uint32) {
		if group != nil {
			used[*group] = true
			bySlot[Slot(pci)] = group
		}
	}
	for _, card := range n.GPUs {
		note(card.PCI, card.IOMMUGroup)
	}
	for _, other := range n.Others {
		note(other.PCI, other.IOMMUGroup)
	}
	next := uint32(firstGroup)
	give := func(pci string, group **uint32) {
		if *group != nil {
			return
		}
		if bySlot[Slot(pci)] == nil {
			for used[next] {
				next++
			}
			number := next
			used[number] = true
			bySlot[Slot(pci)] = &number
		}
		*group = bySlot[Slot(pci)]
	}
	for i := range n.GPUs {
		give(n.GPUs[i].PCI, &n.GPUs[i].IOMMUGroup)
	}
	for i := range n.Others {
		give(n.Others[i].PCI, &n.Others[i].IOMMUGroup)
	}
}

// Slot returns a PCI address without its function number.
func Slot(pci string) string { return pci[:len(pci)-len(".0")] }

// BootDrivers returns an edit of a node file: the functions with these addresses have these drivers
// at boot.
func BootDrivers(drivers map[string]string) func(*Node) error {
	return func(n *Node) error {
		found := 0
		for i := range n.GPUs {
			if driver, named := drivers[n.GPUs[i].PCI]; named {
				n.GPUs[i].Driver = driver
				found++
			}
		}
		for i := range n.Others {
			if driver, named := drivers[n.Others[i].PCI]; named {
				n.Others[i].Driver = driver
				found++
			}
		}
		if found != len(drivers) {
			return fmt.Errorf("not every function of %v is there", drivers)
		}
		return nil
	}
}

// StartsAway reports whether the machine boots with the GPU bound to another driver than NVIDIA's.
func (c Card) StartsAway() bool { return c.Driver != "" && c.Driver != DriverNVIDIA }
