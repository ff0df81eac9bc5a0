package main

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

const nvmlName = "libnvidia-ml.so.1"

// place is a driver root with the NVML library below it.
type place struct {
	root string
	nvml string
}

// usualRoots are where a driver is installed: on the host, by a driver container, on machines that mount one in, on Google's node images.
var usualRoots = []string{"/", "/run/nvidia/driver", "/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/opt/nvidia"}

// libraryFolders are where a driver root may hold its libraries, the longest first, so that a folder is cut to its shortest root.
func libraryFolders() []string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{
		"usr/lib/" + triplet + "/nvidia/current", "usr/lib/" + triplet, "usr/local/nvidia/lib64", "usr/local/nvidia/lib", "lib/" + triplet,
		"opt/nvidia/lib64", "usr/lib/nvidia", "usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib",
	}
}

// findPlaces lists every place where a driver could be, in the order in which they should be tried, and the roots that hold none.
func findPlaces(o options) (found []place, empty []string) {
	roots := usualRoots
	if o.driverRoot != "" {
		roots = []string{o.driverRoot}
	} else {
		for _, folder := range slices.Concat(filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")), cachedFolders("/etc/ld.so.cache"), mountedFolders("/proc/self/mounts")) {
			roots = append(roots, rootsOf(folder)...)
		}
	}
	seen := map[string]bool{}
	for _, root := range roots {
		root = filepath.Clean(root)
		if seen[root] {
			continue
		}
		seen[root] = true
		if library := libraryBelow(root); library != "" {
			found = append(found, place{root: root, nvml: library})
		} else {
			empty = append(empty, root)
		}
	}
	return found, empty
}

func libraryBelow(root string) string {
	for _, folder := range libraryFolders() {
		if path := filepath.Join(root, folder, nvmlName); exists(path) {
			return path
		}
	}
	return ""
}

// rootsOf are the driver roots that a folder of libraries may belong to: /usr/local/nvidia/lib64 to /usr/local/nvidia, and to /.
func rootsOf(folder string) []string {
	var roots []string
	if !filepath.IsAbs(folder) || !exists(filepath.Join(folder, nvmlName)) {
		return nil
	}
	for _, suffix := range slices.Backward(libraryFolders()) {
		if root, ok := strings.CutSuffix(filepath.Clean(folder), "/"+suffix); ok {
			roots = append(roots, "/"+strings.TrimPrefix(root, "/"))
		}
	}
	return roots
}

// cachedFolders are the folders in which the dynamic linker's cache has NVML. The cache holds its strings with a zero byte behind each.
func cachedFolders(cache string) []string {
	data, err := os.ReadFile(cache)
	if err != nil {
		return nil
	}
	var folders []string
	for text := range bytes.SplitSeq(data, []byte{0}) {
		if start := bytes.IndexByte(text, '/'); start >= 0 && bytes.HasSuffix(text, []byte("/"+nvmlName)) {
			folders = append(folders, filepath.Dir(string(text[start:])))
		}
	}
	return folders
}

// mountedFolders are folders of mounts with NVIDIA's name: a driver that was brought into a sandbox.
func mountedFolders(table string) []string {
	file, err := os.Open(table)
	if err != nil {
		return nil
	}
	defer func() { _ = file.Close() }()
	var folders []string
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || !strings.Contains(fields[1], "nvidia") {
			continue
		}
		folders = append(folders, filepath.Dir(fields[1])) // the library itself is mounted
		for _, folder := range libraryFolders() {
			folders = append(folders, filepath.Join(fields[1], folder))
		}
	}
	return folders
}

// devRoot is the folder whose dev holds the device nodes, by the plugin's rule.
func devRoot(o options, root string) string {
	if o.devRoot != "" {
		return o.devRoot
	}
	if isDevice(filepath.Join(root, "dev/nvidiactl")) {
		return root
	}
	return "/"
}

func isDevice(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
