package nvidia

import (
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// Fingerprint is a cheap digest of everything on the node that a scan depends on and that files show: the GPUs on the PCI bus and who drives them,
// the driver's modules, device nodes, libraries, tools and firmware, the instances that GPUs are cut into. While it stays equal there is no reason to wake the GPUs.
func (g *Glance) Fingerprint() string {
	p := g.paths
	h := fnv.New128a()
	root := p.devRoot()
	fmt.Fprintln(h, root, moduleLoaded(p), driverLoad(p)) // a driver that was loaded again between two looks is another one
	gpus, err := g.bus.gpus(p.Sysfs, g.now())
	fmt.Fprintln(h, gpus, err)
	for _, a := range gpus {
		fmt.Fprintln(h, pciDriver(p.Sysfs, a))
	}
	g.digestDir(h, filepath.Join(root, "dev"), "nvidia")
	for _, dir := range driverroot.LibraryDirs() {
		dir := filepath.Join(p.DriverRoot, dir)
		if exists(filepath.Join(dir, driverroot.NVML)) {
			g.digestDir(h, dir, "libcuda", "libnvidia")
		}
	}
	for _, dir := range []string{"usr/bin", "bin"} {
		g.digestDir(h, filepath.Join(p.DriverRoot, dir), "nvidia-")
	}
	firmware := filepath.Join(p.DriverRoot, "lib", "firmware", "nvidia")
	versions, _ := g.list(firmware, func(name string) bool { return strings.Contains(name, ".") })
	for _, version := range versions {
		// Containers get them by their names: what is in them is no reason for a look.
		files, _ := g.list(filepath.Join(firmware, version), func(string) bool { return true })
		fmt.Fprintln(h, version, files)
	}
	return fmt.Sprintf("%x+%x", h.Sum(nil), instancesDigest(p.Proc))
}

// Present says whether there is an NVIDIA GPU on the PCI bus at all. An error means that nobody knows.
func (g *Glance) Present() (bool, error) {
	gpus, err := g.bus.gpus(g.paths.Sysfs, g.now())
	return len(gpus) > 0, err
}

// WithoutInstances is the part of a fingerprint that stays the same while GPUs are cut.
func WithoutInstances(fingerprint string) string {
	files, _, _ := strings.Cut(fingerprint, "+")
	return files
}

// instancesDigest tells which GPU instances and compute instances there are. The kernel gives these directories no times.
func instancesDigest(proc string) []byte {
	h := fnv.New64a()
	capabilities := filepath.Join(proc, "driver", "nvidia", "capabilities")
	for _, gpu := range named(capabilities, "gpu") {
		mig := filepath.Join(capabilities, gpu, "mig")
		for _, instance := range named(mig, "gi") {
			fmt.Fprintln(h, gpu, instance, named(filepath.Join(mig, instance), "ci"))
		}
	}
	return h.Sum(nil)
}

// named names what is called prefix… in a directory, in order; nothing if it cannot be read.
func named(dir, prefix string) []string {
	entries, _ := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

// digestDir adds what is called prefix… in a directory: name, kind, size and time. Device nodes change their time with every use of a
// terminal but not their number.
func (g *Glance) digestDir(h io.Writer, dir string, prefixes ...string) {
	names, err := g.list(dir, func(name string) bool { return hasAnyPrefix(name, prefixes) })
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
			fmt.Fprintln(h, deviceNumber(info))
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
