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

// Check looks for what must be there before NVML can be asked: a platform that is supported, the library, the control nodes.
// It reads files only, and so is cheap enough to be polled.
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
		return notReady("use a Linux host", "this is Windows Subsystem for Linux (/dev/dxg exists): GPUs have no device nodes of their own there, so they cannot be handed out one by one")
	}
	family, _ := os.ReadFile(filepath.Join(p.Sysfs, "devices", "soc0", "family"))
	if exists(filepath.Join(p.DriverRoot, "etc", "nv_tegra_release")) || bytes.HasPrefix(bytes.ToLower(family), []byte("tegra")) {
		return notReady("keep this driver off such nodes with the chart's nodeSelector or affinity", "this is an NVIDIA Tegra (Jetson) system: its integrated GPU is not supported")
	}
	return nil
}

// checkControlNodes asks for every node that CUDA needs besides the GPU's own. Without nvidia-uvm nvidia-smi works and every CUDA program fails.
func checkControlNodes(p Paths) error {
	dev := filepath.Join(p.devRoot(), "dev")
	for _, n := range []struct{ name, remedy string }{
		{"nvidiactl", "run nvidia-modprobe -c=255 on the node (or nvidia-smi, which makes it too)"},
		{"nvidia-uvm", "run nvidia-modprobe -u -c=0 on the node"},
		{"nvidia-uvm-tools", "run nvidia-modprobe -u -c=0 -c=1 on the node"},
	} {
		path := filepath.Join(dev, n.name)
		if isCharDevice(path) {
			continue
		}
		if n.name == "nvidiactl" && !moduleLoaded(p) {
			return notReady("run modprobe nvidia on the node, and look at dmesg if that fails", "the NVIDIA kernel module is not loaded (there is neither %s nor /proc/driver/nvidia)", p.host(path))
		}
		return notReady(n.remedy, "device node %s is missing", p.host(path))
	}
	return nil
}

func moduleLoaded(p Paths) bool {
	return exists(filepath.Join(p.Proc, "driver", "nvidia", "version")) || exists(filepath.Join(p.Sysfs, "module", "nvidia"))
}

// HasNVIDIADevice says whether sysfs lists an NVIDIA display controller. It is the cheap question that a node without GPUs asks for ever.
// An unreadable sysfs is an error, not a no.
func HasNVIDIADevice(sysfs string) (bool, error) {
	gpus, err := pciGPUs(sysfs)
	return len(gpus) > 0, err
}

// pciGPUs lists NVIDIA's display controllers on the PCI bus once.
func pciGPUs(sysfs string) ([]device.PCIAddress, error) { return new(pciBus).gpus(sysfs, time.Now()) }

// pciDriver is the kernel driver that holds a PCI function, empty when none does.
func pciDriver(sysfs string, a device.PCIAddress) string {
	target, err := os.Readlink(filepath.Join(sysfs, "bus", "pci", "devices", string(a), "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// pciSeat tells a PCI function from one that comes to the same address later: the kernel makes it a new directory. It is 0 where there is none.
func pciSeat(sysfs string, a device.PCIAddress) uint64 {
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

// place fills in where in the machine the card sits. What sysfs does not say stays unknown: absent is better than wrong.
func place(sysfs string, g *device.GPU) {
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
