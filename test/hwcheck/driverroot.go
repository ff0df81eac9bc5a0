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

// place is a possible driver root, with the path of the NVML library below it.
type place struct {
	root string
	nvml string
}

// usualRoots are the usual driver roots: of a driver on the host, from a driver container, from a
// mount, and on Google's node images.
var usualRoots = []string{"/", "/run/nvidia/driver", "/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/opt/nvidia"}

// libraryFolders returns the folders below a driver root in which the NVML library may be. If one
// folder's path ends with another's, the longer comes first. So a caller that removes the first
// matching end from a path gets the shortest root.
func libraryFolders() []string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{
		"opt/nvidia/current/usr/lib64", "run/opengl-driver/lib", "usr/lib/nvidia/tesla",
		"usr/lib/" + triplet + "/nvidia/current", "usr/lib/" + triplet, "usr/local/nvidia/lib64", "usr/local/nvidia/lib", "lib/" + triplet,
		"opt/nvidia/lib64", "usr/lib/nvidia", "usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib",
	}
}

// findPlaces returns the driver roots that have the NVML library, in the order in which findDriver
// tries them. The result empty has the roots without that library.
func findPlaces(o options) (found []place, empty []string) {
	roots := usualRoots
	if o.driverRoot != "" {
		roots = []string{o.driverRoot}
	} else {
		for _, folder := range slices.Concat(
			filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")), cachedFolders("/etc/ld.so.cache"), mountedFolders("/proc/self/mounts"),
		) {
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

// rootsOf returns the driver roots that the NVML library in this folder may belong to. For
// /usr/local/nvidia/lib64 these are /usr/local/nvidia and /.
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

// cachedFolders returns the folders of the NVML library that the dynamic linker's cache names. Each
// string in the cache ends with a zero byte.
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

// mountedFolders returns folders that may have the NVML library because a mount there has nvidia in
// its path. A sandbox gets the host's driver through such mounts. table is the path of the mount
// table.
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
		folders = append(folders, filepath.Dir(fields[1])) // in case the library itself is mounted
		for _, folder := range libraryFolders() {
			folders = append(folders, filepath.Join(fields[1], folder))
		}
	}
	return folders
}

// devRoot returns the folder whose subfolder dev has the device nodes: the one in the options, else
// the driver root if it has them, else /. The plugin follows the same rule.
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
