package host

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// NVIDIADriver is the name of NVIDIA's kernel driver in sysfs.
const NVIDIADriver = "nvidia"

// GPUs lists NVIDIA's GPUs on the PCI bus: the functions with vendor 10de that have class 03xxxx
// (display controller) or NVIDIA's kernel driver, whatever their class. NVSwitches (0680xx) have
// another driver, and audio functions, too.
func GPUs(sysfs string) ([]device.PCIAddress, error) {
	dir := filepath.Join(sysfs, "bus", "pci", "devices")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var gpus []device.PCIAddress
	for _, e := range entries {
		address, err := device.ParsePCIAddress(e.Name())
		if err != nil || hostfile.ReadTrimmed(filepath.Join(dir, e.Name(), "vendor")) != "0x10de" {
			continue
		}
		class := hostfile.ReadTrimmed(filepath.Join(dir, e.Name(), "class"))
		if strings.HasPrefix(class, "0x03") || Driver(sysfs, address) == NVIDIADriver {
			gpus = append(gpus, address)
		}
	}
	slices.Sort(gpus)
	return gpus, nil
}

// Driver returns the name of the kernel driver that is bound to a PCI function, empty if none
// is.
func Driver(sysfs string, a device.PCIAddress) string {
	target, err := os.Readlink(filepath.Join(sysfs, "bus", "pci", "devices", string(a), "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// Binding returns a text that is another one each time a driver is bound to a PCI function, also
// when the same driver is loaded again. It is empty if no driver is bound, or where sysfs does not
// tell. It consists of the inode and the birth time of the link to the driver, which the kernel
// makes anew (driver_sysfs_add in drivers/base/dd.c).
//
// /proc/driver/nvidia/gpus tells the number of the device node itself. But its file information
// asks the driver for the VBIOS version under the driver's global lock, and wakes a suspended GPU
// (nv_procfs_read_gpu_info in the open kernel modules), so one hung GPU could block every reader.
func Binding(sysfs string, a device.PCIAddress) string {
	var s unix.Statx_t
	link := filepath.Join(sysfs, "bus", "pci", "devices", string(a), "driver")
	if err := unix.Statx(unix.AT_FDCWD, link, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_BTIME, &s); err != nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", s.Ino, s.Btime.Sec, s.Btime.Nsec)
}

// GraphicsDevices returns the names of a PCI function's DRM devices, such as card1 and renderD128.
// nvidia-drm makes both for each GPU (open-gpu-kernel-modules, nvidia-drm-drv.c).
func GraphicsDevices(sysfs string, a device.PCIAddress) []string {
	found, _ := fs.Glob(os.DirFS(filepath.Join(sysfs, "bus", "pci", "devices", string(a), "drm")), "*[0-9]")
	return slices.DeleteFunc(found, func(name string) bool { return !graphicsName.MatchString(name) })
}

var graphicsName = regexp.MustCompile(`^(card|renderD)[0-9]+$`)

// Incarnation returns a number for a PCI function that NVIDIA's driver has and lists. It is the
// inode of the function's sysfs directory, so another function that later takes the address has
// another number. It is 0 if the driver does not list the function yet, if the function leaves the
// driver, and everywhere if /proc has no list of the driver.
func Incarnation(p nvidia.Paths, a device.PCIAddress) uint64 {
	// The kernel links the driver before the driver lists the function (drivers/base/dd.c).
	if Driver(p.Sysfs, a) != NVIDIADriver || !hostfile.Exists(filepath.Join(p.Proc, "driver/nvidia/gpus", string(a))) {
		return 0
	}
	info, err := os.Stat(filepath.Join(p.Sysfs, "bus", "pci", "devices", string(a)))
	if err != nil {
		return 0
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return stat.Ino
}
