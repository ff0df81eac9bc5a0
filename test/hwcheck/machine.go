package main

import (
	"bufio"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// look returns the facts about the machine that can be read without NVIDIA's driver, such as the
// kernel version.
func look(o options) facts.Machine {
	m := facts.Machine{Architecture: runtime.GOARCH, OS: osName(), Cgroups: cgroups()}
	var names unix.Utsname
	if unix.Uname(&names) == nil {
		m.Kernel = unix.ByteSliceToString(names.Release[:])
	}
	m.PCI = pciFunctions(o.sysfs)
	m.KernelDriver = kernelDriver(o.proc)
	return m
}

// kernelDriver reads what procfs says about the loaded driver.
func kernelDriver(proc string) *facts.KernelDriver {
	folder := filepath.Join(proc, "driver/nvidia")
	version, _, _ := strings.Cut(content(folder, "version"), "\n")
	if version == "" {
		return nil
	}
	found := &facts.KernelDriver{Version: version}
	if parameters := content(folder, "params"); parameters != "" {
		found.Parameters = strings.Split(parameters, "\n")
	}
	capabilities := filepath.Join(folder, "capabilities")
	_ = filepath.WalkDir(capabilities, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			found.Capabilities = append(found.Capabilities, strings.TrimPrefix(path, capabilities+"/"))
		}
		return nil // a file that cannot be read is left out
	})
	for line := range strings.SplitSeq(content(proc, "devices"), "\n") {
		if strings.Contains(line, "nvidia") {
			found.Majors = append(found.Majors, strings.TrimSpace(line))
		}
	}
	return found
}

// numberLinks counts the links in the folder char of dev that lead to NVIDIA's device nodes.
// Containers need them after a reload of systemd.
func numberLinks(dev string) int {
	links, _ := filepath.Glob(filepath.Join(dev, "char/*"))
	count := 0
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.Contains(target, "nvidia") {
			count++
		}
	}
	return count
}

func osName() string {
	file, err := os.Open("/etc/os-release")
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if name, ok := strings.CutPrefix(lines.Text(), "PRETTY_NAME="); ok {
			return strings.Trim(name, `"`)
		}
	}
	return ""
}

func cgroups() string {
	var fs unix.Statfs_t
	switch {
	case unix.Statfs("/sys/fs/cgroup", &fs) != nil:
		return "none"
	case fs.Type == unix.CGROUP2_SUPER_MAGIC:
		return "v2"
	case exists("/sys/fs/cgroup/devices"):
		return "v1"
	default:
		return "none"
	}
}

// pciFunctions lists the display controllers (class 03xxxx) of NVIDIA (vendor 10de).
func pciFunctions(sysfs string) []facts.PCIFunction {
	folders, _ := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*"))
	var found []facts.PCIFunction
	for _, folder := range folders {
		if content(folder, "vendor") != "0x10de" || !strings.HasPrefix(content(folder, "class"), "0x03") {
			continue
		}
		f := facts.PCIFunction{Address: filepath.Base(folder), Device: content(folder, "device")}
		if driver, err := os.Readlink(filepath.Join(folder, "driver")); err == nil {
			f.Driver = filepath.Base(driver)
		}
		found = append(found, f)
	}
	return found
}

// deviceNodes returns the names of the NVIDIA device nodes in the folder dev.
func deviceNodes(dev string) []string {
	paths, _ := filepath.Glob(filepath.Join(dev, "nvidia*"))
	names := make([]string, len(paths))
	for i, path := range paths {
		names[i] = filepath.Base(path)
	}
	return names
}

func content(parts ...string) string {
	data, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
