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
func Fingerprint(p Paths) string {
	p = p.withDefaults()
	h := fnv.New128a()
	root := p.devRoot()
	fmt.Fprintln(h, root, moduleLoaded(p), driverLoad(p)) // a driver that was loaded again between two looks is another one
	gpus, err := pciGPUs(p.Sysfs)
	fmt.Fprintln(h, gpus, err)
	for _, a := range gpus {
		fmt.Fprintln(h, pciDriver(p.Sysfs, a))
	}
	digestDir(h, filepath.Join(root, "dev"), "nvidia")
	for _, dir := range driverroot.LibraryDirs() {
		dir := filepath.Join(p.DriverRoot, dir)
		if exists(filepath.Join(dir, driverroot.NVML)) {
			digestDir(h, dir, "libcuda", "libnvidia")
		}
	}
	for _, dir := range []string{"usr/bin", "bin"} {
		digestDir(h, filepath.Join(p.DriverRoot, dir), "nvidia-")
	}
	firmware, _ := filepath.Glob(filepath.Join(p.DriverRoot, "lib", "firmware", "nvidia", "*.*"))
	for _, dir := range firmware { // one for each version of the driver
		files, _ := filepath.Glob(filepath.Join(dir, "*")) // Containers get them by their names: what is in them is no reason for a look.
		fmt.Fprintln(h, files)
	}
	return fmt.Sprintf("%x+%x", h.Sum(nil), instancesDigest(p.Proc))
}

// WithoutInstances is the part of a fingerprint that stays the same while GPUs are cut.
func WithoutInstances(fingerprint string) string {
	files, _, _ := strings.Cut(fingerprint, "+")
	return files
}

// instancesDigest tells which GPU instances and compute instances there are.
func instancesDigest(proc string) []byte {
	h := fnv.New64a()
	for _, pattern := range []string{"gi*", "gi*/ci*"} {
		names, _ := filepath.Glob(filepath.Join(proc, "driver", "nvidia", "capabilities", "gpu*", "mig", pattern))
		fmt.Fprintln(h, names)
	}
	return h.Sum(nil)
}

// digestDir adds what is called prefix… in a directory: name, kind, size and time. Device nodes change their time with every use of a
// terminal but not their number.
func digestDir(h io.Writer, dir string, prefixes ...string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		fmt.Fprintln(h, dir, "unreadable")
		return
	}
	for _, e := range entries {
		if !hasAnyPrefix(e.Name(), prefixes) {
			continue
		}
		info, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil {
			fmt.Fprintln(h, e.Name(), "unreadable")
			continue
		}
		fmt.Fprintln(h, e.Name(), info.Mode())
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
