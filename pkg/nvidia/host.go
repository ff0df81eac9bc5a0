package nvidia

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Check returns an error if NVML cannot start: the platform is not supported, or the library or a
// control device node is missing. It only looks at files, so it is cheap enough for polling.
func Check(p Paths) error {
	p = p.withDefaults()
	if err := checkPlatform(p); err != nil {
		return err
	}
	if _, err := findLibrary(p); err != nil {
		return err
	}
	return checkControlNodes(p)
}

func checkPlatform(p Paths) error {
	if exists(filepath.Join(p.devRoot(), "dev", "dxg")) {
		return notReady("use a Linux host", "this is Windows Subsystem for Linux (/dev/dxg exists): "+
			"GPUs have no device nodes of their own there, so they cannot be handed out one by one")
	}
	family, _ := os.ReadFile(filepath.Join(p.Sysfs, "devices", "soc0", "family"))
	if exists(filepath.Join(p.DriverRoot, "etc", "nv_tegra_release")) || bytes.HasPrefix(bytes.ToLower(family), []byte("tegra")) {
		return notReady("keep this driver off such nodes with the chart's nodeSelector or affinity",
			"this is an NVIDIA Tegra (Jetson) system: its integrated GPU is not supported")
	}
	return nil
}

// checkControlNodes returns an error if a device node that CUDA needs in addition to the GPU's own
// is missing. Without nvidia-uvm, nvidia-smi works, but every CUDA program fails.
func checkControlNodes(p Paths) error {
	dev := filepath.Join(p.devRoot(), "dev")
	for _, n := range []struct{ name, remedy string }{
		{"nvidiactl", "run nvidia-modprobe -c=255 on the node (or nvidia-smi, which creates it too)"},
		{"nvidia-uvm", "run nvidia-modprobe -u -c=0 on the node"},
		{"nvidia-uvm-tools", "run nvidia-modprobe -u -c=0 -c=1 on the node"},
	} {
		path := filepath.Join(dev, n.name)
		if isCharDevice(path) {
			continue
		}
		if n.name == "nvidiactl" && !moduleLoaded(p) {
			return notReady("run modprobe nvidia on the node, and check dmesg if that fails",
				"the NVIDIA kernel module is not loaded (there is neither %s nor /proc/driver/nvidia)", p.host(path))
		}
		return notReady(n.remedy, "device node %s is missing", p.host(path))
	}
	return nil
}

func moduleLoaded(p Paths) bool {
	return exists(filepath.Join(p.Proc, "driver", "nvidia", "version")) || exists(filepath.Join(p.Sysfs, "module", "nvidia"))
}

// HasNVIDIADevice reports whether sysfs lists an NVIDIA display controller. The plugin polls it on
// nodes without GPUs, so it must be cheap. It fails if sysfs cannot be read.
func HasNVIDIADevice(sysfs string) (bool, error) {
	gpus, err := pciGPUs(sysfs)
	return len(gpus) > 0, err
}

// pciGPUs lists NVIDIA's display controllers on the PCI bus, without a cache.
func pciGPUs(sysfs string) ([]device.PCIAddress, error) { return new(pciBus).gpus(sysfs, time.Now()) }

// pciDriver returns the name of the kernel driver that is bound to a PCI function, empty if none
// is.
func pciDriver(sysfs string, a device.PCIAddress) string {
	target, err := os.Readlink(filepath.Join(sysfs, "bus", "pci", "devices", string(a), "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// pciInode returns the inode of a PCI function's sysfs directory. Another function that later takes
// the same address has another inode. It is 0 if no function has the address.
func pciInode(sysfs string, a device.PCIAddress) uint64 {
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

// locate sets the PCIe root and NUMA node of g. They stay empty if sysfs does not report them.
func locate(sysfs string, g *device.GPU) {
	fs := deviceattribute.WithFSFromRoot(sysfs)
	if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(string(g.PCIAddress), fs); err == nil {
		g.PCIeRoot = *a.Value.StringValue
	}
	if a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(string(g.PCIAddress), deviceattribute.ScalarAttribute, fs); err == nil {
		node := int(*a.Value.IntValue)
		g.NUMANode = &node
	}
}

func readTrimmed(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
