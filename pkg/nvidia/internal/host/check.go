package host

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// Check returns an error if NVML cannot start: the platform is not supported, or the library or a
// control device node is missing. It only looks at files, so it is cheap enough for polling.
func Check(p nvidia.Paths) error {
	p = p.WithDefaults()
	if err := checkPlatform(p); err != nil {
		return err
	}
	if _, err := Library(p); err != nil {
		return err
	}
	return checkControlNodes(p)
}

func checkPlatform(p nvidia.Paths) error {
	if hostfile.Exists(filepath.Join(p.DeviceRoot(), "dev", "dxg")) {
		return nvidia.NotReady("use a Linux host", "this is Windows Subsystem for Linux (/dev/dxg exists): "+
			"GPUs have no device nodes of their own there, so they cannot be handed out one by one")
	}
	family, _ := os.ReadFile(filepath.Join(p.Sysfs, "devices", "soc0", "family"))
	_, err := driverroot.Resolve(p.DriverRoot, "etc/nv_tegra_release")
	if err == nil || bytes.HasPrefix(bytes.ToLower(family), []byte("tegra")) {
		return nvidia.NotReady("keep this driver off such nodes with the chart's nodeSelector or affinity",
			"this is an NVIDIA Tegra (Jetson) system: its integrated GPU is not supported")
	}
	return nil
}

// checkControlNodes returns an error if a device node that CUDA needs in addition to the GPU's own
// is missing. Without nvidia-uvm, nvidia-smi works, but every CUDA program fails. Only profilers
// need nvidia-uvm-tools, which some systems do not create.
func checkControlNodes(p nvidia.Paths) error {
	dev := filepath.Join(p.DeviceRoot(), "dev")
	for _, n := range []struct{ name, remedy string }{
		{"nvidiactl", "run nvidia-modprobe -c=255 on the node (or nvidia-smi, which creates it too)"},
		{"nvidia-uvm", "run nvidia-modprobe -u -c=0 on the node"},
	} {
		path := filepath.Join(dev, n.name)
		if hostfile.IsCharDevice(path) {
			continue
		}
		if n.name == "nvidiactl" && !ModuleLoaded(p) {
			return nvidia.NotReady("run modprobe nvidia on the node, and check dmesg if that fails",
				"the NVIDIA kernel module is not loaded (there is neither %s nor /proc/driver/nvidia)", p.Host(path))
		}
		return nvidia.NotReady(n.remedy, "device node %s is missing", p.Host(path))
	}
	return nil
}

// Library returns the path of the NVML library under the driver root, as this process sees it.
func Library(p nvidia.Paths) (string, error) {
	if path, ok := driverroot.Library(p.DriverRoot); ok {
		return path, nil
	}
	return "", nvidia.NotReady(
		"install the NVIDIA driver on this node, or set the driver root to where it is installed",
		"%s is not under the driver root %s (looked in %s)", driverroot.NVML, p.HostDriverRoot, strings.Join(driverroot.LibraryDirs(), ", "))
}
