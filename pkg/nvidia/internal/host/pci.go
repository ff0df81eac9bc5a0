package host

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// Bus lists NVIDIA's display controllers on the PCI bus. A server has hundreds of PCI functions,
// so Bus reads a function's files only once, until another function takes its address. The zero
// value is ready to use. It is not safe for concurrent use.
type Bus struct {
	functions map[string]function // by PCI address
}

type function struct {
	vendor durable.Stamp // stamp of the file vendor, which another function replaces
	isGPU  bool
}

// GPUs lists the PCI functions with vendor 10de and class 03xxxx. NVSwitches (0680xx) and audio
// functions do not match.
func (b *Bus) GPUs(sysfs string, now time.Time) ([]device.PCIAddress, error) {
	dir := filepath.Join(sysfs, "bus", "pci", "devices")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	functions := make(map[string]function, len(entries))
	var gpus []device.PCIAddress
	for _, e := range entries {
		vendor := filepath.Join(dir, e.Name(), "vendor")
		f, known := b.functions[e.Name()]
		if stamp := durable.StampOf(vendor); !known || f.vendor != stamp {
			f = function{stamp, hostfile.ReadTrimmed(vendor) == "0x10de" &&
				strings.HasPrefix(hostfile.ReadTrimmed(filepath.Join(dir, e.Name(), "class")), "0x03")}
		}
		if f.vendor.Settled(now) {
			functions[e.Name()] = f
		}
		if address, err := device.ParsePCIAddress(e.Name()); err == nil && f.isGPU {
			gpus = append(gpus, address)
		}
	}
	b.functions = functions
	slices.Sort(gpus)
	return gpus, nil
}

// GPUs lists NVIDIA's display controllers on the PCI bus, without a cache.
func GPUs(sysfs string) ([]device.PCIAddress, error) { return new(Bus).GPUs(sysfs, time.Now()) }

// Driver returns the name of the kernel driver that is bound to a PCI function, empty if none
// is.
func Driver(sysfs string, a device.PCIAddress) string {
	target, err := os.Readlink(filepath.Join(sysfs, "bus", "pci", "devices", string(a), "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// Inode returns the inode of a PCI function's sysfs directory. Another function that later takes
// the same address has another inode. It is 0 if no function has the address.
func Inode(sysfs string, a device.PCIAddress) uint64 {
	info, err := os.Stat(filepath.Join(sysfs, "bus", "pci", "devices", string(a)))
	if err != nil {
		return 0
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return stat.Ino
}
