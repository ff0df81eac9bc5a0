package scan

import (
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// Fingerprint returns a cheap digest of all files that a scan depends on: GPUs on the PCI bus with
// their kernel drivers, the driver's modules, device nodes, libraries, tools and firmware, and the
// MIG instances. While the digest stays equal, no scan is needed, and the GPUs can sleep.
func Fingerprint(p nvidia.Paths) string {
	p = p.WithDefaults()
	h := fnv.New128a()
	root := p.DeviceRoot()
	// DriverLoad returns another value if the driver was reloaded since the last call.
	fmt.Fprintln(h, root, host.ModuleLoaded(p), host.DriverLoad(p))
	gpus, err := host.GPUs(p.Sysfs)
	fmt.Fprintln(h, gpus, err)
	for _, a := range gpus {
		fmt.Fprintln(h, host.Driver(p.Sysfs, a), host.Binding(p.Sysfs, a), drmNodes(p, a))
	}
	if p.Passthrough {
		modules, _ := fs.Glob(os.DirFS(p.Sysfs), "module/*vfio*")
		fmt.Fprintln(h, modules, hostfile.ReadTrimmed(filepath.Join(p.Sysfs, "module/nvidia_drm/parameters/modeset")))
	}
	digestDir(h, filepath.Join(root, "dev"), "nvidia")
	if library, ok := driverroot.Library(p.DriverRoot); ok {
		digestDir(h, filepath.Dir(library), "libcuda", "libnvidia")
	}
	for _, dir := range driverroot.LibraryDirs() {
		dir := filepath.Join(p.DriverRoot, dir)
		if hostfile.Exists(filepath.Join(dir, driverroot.NVML)) {
			digestDir(h, dir, "libcuda", "libnvidia")
		}
	}
	for _, dir := range []string{"usr/bin", "bin", "usr/local/bin", "opt/bin", "etc/alternatives"} {
		digestDir(h, filepath.Join(p.DriverRoot, dir), "nvidia-")
	}
	// CDI edits name the firmware files of each version but do not depend on their content.
	firmware, _ := fs.Glob(os.DirFS(p.DriverRoot), "lib/firmware/nvidia/*.*/*")
	fmt.Fprintln(h, firmware)
	return fmt.Sprintf("%x+%x", h.Sum(nil), instancesDigest(p.Proc))
}

// Binding identifies the present binding of a card to its kernel driver. The driver numbers the
// device nodes of a card when it is bound, and may choose other numbers when it is loaded again or
// the card returns. It only looks at sysfs, so a hung GPU cannot block it.
func Binding(sysfs string, a device.PCIAddress) string { return host.Binding(sysfs, a) }

// HasNVIDIADevice reports whether sysfs lists an NVIDIA display controller. The plugin polls it on
// nodes without GPUs, so it must be cheap. It fails if sysfs cannot be read.
func HasNVIDIADevice(sysfs string) (bool, error) {
	gpus, err := host.GPUs(sysfs)
	return len(gpus) > 0, err
}

// WithoutInstances returns the part of a fingerprint that stays equal when MIG instances change.
func WithoutInstances(fingerprint string) string {
	files, _, _ := strings.Cut(fingerprint, "+")
	return files
}

// instancesDigest hashes the names of all GPU instances and compute instances.
func instancesDigest(proc string) []byte {
	h := fnv.New64a()
	for _, pattern := range []string{"gpu*/mig/gi*", "gpu*/mig/gi*/ci*"} {
		names, _ := fs.Glob(os.DirFS(filepath.Join(proc, "driver", "nvidia", "capabilities")), pattern)
		fmt.Fprintln(h, names)
	}
	return h.Sum(nil)
}

// digestDir adds name, kind, size and time of the entries of dir that start with one of the
// prefixes, and the target of a symlink, which may lead nowhere in this process's root. For a
// device node it adds the device number instead of the time, because the time changes with use.
func digestDir(h io.Writer, dir string, prefixes ...string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		fmt.Fprintln(h, dir, "unreadable")
		return
	}
	for _, e := range entries {
		if !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(e.Name(), p) }) {
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 {
			target, _ := os.Readlink(filepath.Join(dir, e.Name()))
			fmt.Fprintln(h, target)
		}
		info, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil {
			fmt.Fprintln(h, e.Name(), "unreadable")
			continue
		}
		fmt.Fprintln(h, e.Name(), info.Mode())
		if info.Mode()&fs.ModeDevice != 0 {
			fmt.Fprintln(h, hostfile.DeviceNumber(info))
		} else if info.Mode().IsRegular() {
			fmt.Fprintln(h, info.Size(), info.ModTime().UnixNano())
		}
	}
}
