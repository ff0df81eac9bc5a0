package vfio

import (
	"cmp"
	"fmt"
	"slices"
)

// Refusal says why the GPU cannot be passed to a virtual machine, and what an admin can do. It is
// "" if nothing in sysfs speaks against it.
func (g Group) Refusal() string {
	switch {
	case g.GPU.Vendor != nvidiaVendor:
		return fmt.Sprintf("its PCI vendor is %#04x, not NVIDIA", g.GPU.Vendor)
	case g.Number < 0:
		return "it has no IOMMU group: enable the IOMMU in the firmware and on the kernel's command line (intel_iommu=on); " +
			"in a virtual machine its host must provide one"
	case g.NoIOMMU:
		return "VFIO runs without an IOMMU here, so nothing would isolate the virtual machine: enable the IOMMU"
	case g.IsVirtual:
		return "it is a virtual function of another GPU"
	case g.VirtualFunctions > 0:
		return fmt.Sprintf("%d of its virtual functions are enabled: write 0 to its sriov_numvfs", g.VirtualFunctions)
	case len(g.ResetMethods) == 0:
		return "the kernel cannot reset it, so one virtual machine would leave its data to the next"
	}
	if g.modesetKeepsGPU() {
		return fmt.Sprintf("kernel module nvidia_drm has modeset=1, with which driver %s never gives a GPU up: "+
			"load it with nvidia_drm modeset=0 (/etc/modprobe.d), or install driver 580.105.08 or later",
			cmp.Or(g.NVIDIADriver, "of unknown version"))
	}
	for _, c := range g.Companions {
		if c.IsDisplay() {
			return fmt.Sprintf("another display controller, %s, is in its slot or in IOMMU group %d, so a virtual machine would get both: "+
				"put one of the cards into another slot", c.Address, g.Number)
		}
		// Other functions of the GPU's own slot serve only it. Another card has users of its own.
		if !sameSlot(string(c.Address), string(g.GPU.Address)) && c.Driver != "" && !c.Bound() {
			return fmt.Sprintf("it shares IOMMU group %d with %s, which driver %s uses: put one of the cards into another slot, or unbind %s",
				g.Number, c.Address, c.Driver, c.Address)
		}
	}
	return ""
}

// letsGo is the first version of NVIDIA's driver in which nvidia_drm with modeset=1 closes a GPU
// that is unbound. Before it, the unbind waits until the next boot (nv_pci_remove_helper in the
// open kernel modules).
var letsGo = []int{580, 105, 8}

// modesetKeepsGPU reports whether NVIDIA's driver has the GPU and would never give it up.
func (g Group) modesetKeepsGPU() bool {
	version := make([]int, len(letsGo)) // what cannot be parsed stays 0, so it counts as old
	_, _ = fmt.Sscanf(g.NVIDIADriver, "%d.%d.%d", &version[0], &version[1], &version[2])
	return g.Modeset && g.GPU.Driver == "nvidia" && slices.Compare(version, letsGo) < 0
}
