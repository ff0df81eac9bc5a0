package vfio

import (
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// regions is how many memory regions (BARs) a PCI function has. The lines of the file resource
	// after them are its expansion ROM, bridge windows and virtual functions.
	regions = 6
	// region64 is in the flags of a memory region with a 64-bit address (linux/ioport.h and
	// linux/pci_regs.h).
	region64 = 0x04
)

// AddressableMemory returns how many bytes of address space the GPU's 64-bit memory regions take,
// rounded up to a power of two: what a virtual machine must reserve for the GPU.
func AddressableMemory(sysfs string, gpu device.PCIAddress) (uint64, error) {
	dir := directory{path: filepath.Join(sysfs, "bus/pci/devices", string(gpu))}
	resource := dir.text("resource")
	if dir.err != nil {
		return 0, fmt.Errorf("read the memory regions of %s: %w", gpu, dir.err)
	}
	var total uint64
	for i, line := range strings.Split(resource, "\n") {
		var start, end, flags uint64
		if n, _ := fmt.Sscanf(line, "0x%x 0x%x 0x%x", &start, &end, &flags); i < regions && n == 3 && flags&region64 != 0 && end > start {
			total += end - start + 1
		}
	}
	if total == 0 {
		return 0, nil
	}
	return 1 << bits.Len64(total-1), nil
}

// HasIOMMUFD reports whether the host's kernel has iommufd. A built-in one has no module.
func HasIOMMUFD(sysfs string) bool {
	for _, file := range []string{"class/misc/iommu", "module/iommufd"} {
		if _, err := os.Stat(filepath.Join(sysfs, file)); err == nil {
			return true
		}
	}
	return false
}
