package scan

import (
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// Fingerprint returns a cheap digest of all files that a scan depends on: GPUs on the PCI bus with
// their kernel drivers, the driver's modules, device nodes, libraries, tools and firmware, and the
// MIG instances. While the digest stays equal, no scan is needed, and the GPUs can sleep.
func (c *ChangeDetector) Fingerprint() string {
	p := c.paths
	h := fnv.New128a()
	root := p.DeviceRoot()
	// DriverLoad returns another value if the driver was reloaded since the last call.
	fmt.Fprintln(h, root, host.ModuleLoaded(p), host.DriverLoad(p))
	gpus, err := c.bus.GPUs(p.Sysfs, c.now())
	fmt.Fprintln(h, gpus, err)
	for _, a := range gpus {
		fmt.Fprintln(h, host.Driver(p.Sysfs, a))
	}
	c.digestDir(h, filepath.Join(root, "dev"), "nvidia")
	for _, dir := range driverroot.LibraryDirs() {
		dir := filepath.Join(p.DriverRoot, dir)
		if hostfile.Exists(filepath.Join(dir, driverroot.NVML)) {
			c.digestDir(h, dir, "libcuda", "libnvidia")
		}
	}
	for _, dir := range []string{"usr/bin", "bin"} {
		c.digestDir(h, filepath.Join(p.DriverRoot, dir), "nvidia-")
	}
	firmware := filepath.Join(p.DriverRoot, "lib", "firmware", "nvidia")
	versions, _ := c.list(firmware, func(name string) bool { return strings.Contains(name, ".") })
	for _, version := range versions {
		// CDI edits name these firmware files but do not depend on their content, so the digest has
		// only their names.
		files, _ := c.list(filepath.Join(firmware, version), func(string) bool { return true })
		fmt.Fprintln(h, version, files)
	}
	return fmt.Sprintf("%x+%x", h.Sum(nil), instancesDigest(p.Proc))
}

// Present reports whether an NVIDIA GPU is on the PCI bus. It fails if sysfs cannot be
// read.
func (c *ChangeDetector) Present() (bool, error) {
	gpus, err := c.bus.GPUs(c.paths.Sysfs, c.now())
	return len(gpus) > 0, err
}

// WithoutInstances returns the part of a fingerprint that stays equal when MIG instances change.
func WithoutInstances(fingerprint string) string {
	files, _, _ := strings.Cut(fingerprint, "+")
	return files
}

// instancesDigest hashes the names of all GPU instances and compute instances. The kernel does not
// update the times of their directories, so it lists them each time.
func instancesDigest(proc string) []byte {
	h := fnv.New64a()
	capabilities := filepath.Join(proc, "driver", "nvidia", "capabilities")
	for _, gpu := range entriesWithPrefix(capabilities, "gpu") {
		mig := filepath.Join(capabilities, gpu, "mig")
		for _, instance := range entriesWithPrefix(mig, "gi") {
			fmt.Fprintln(h, gpu, instance, entriesWithPrefix(filepath.Join(mig, instance), "ci"))
		}
	}
	return h.Sum(nil)
}

// entriesWithPrefix lists the names in dir that start with prefix, sorted. If dir cannot be read,
// the list is empty.
func entriesWithPrefix(dir, prefix string) []string {
	entries, _ := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

// digestDir adds name, kind, size and time of the entries of dir that start with one of the
// prefixes. For a device node it adds the device number instead of the time, because the time
// changes with use.
func (c *ChangeDetector) digestDir(h io.Writer, dir string, prefixes ...string) {
	names, err := c.list(dir, func(name string) bool { return hasAnyPrefix(name, prefixes) })
	if err != nil {
		fmt.Fprintln(h, dir, "unreadable")
		return
	}
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			fmt.Fprintln(h, name, "unreadable")
			continue
		}
		fmt.Fprintln(h, name, info.Mode())
		if info.Mode()&fs.ModeDevice != 0 {
			fmt.Fprintln(h, hostfile.DeviceNumber(info))
		} else if info.Mode().IsRegular() {
			fmt.Fprintln(h, info.Size(), info.ModTime().UnixNano())
		}
	}
}

func hasAnyPrefix(name string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}
