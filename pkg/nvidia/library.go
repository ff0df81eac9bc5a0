package nvidia

import (
	"path/filepath"
	"runtime"
	"strings"
)

const libraryName = "libnvidia-ml.so.1"

// libraryDirs are the directories of a driver root that distributions, driver containers and cloud images put the driver's libraries into.
// They are tried in order; the first that holds the library wins.
func libraryDirs() []string { return append(customaryDirs(), unusualDirs...) }

// customaryDirs are the ones in which nvcdi looks by itself.
func customaryDirs() []string {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{
		"usr/lib64",
		"usr/lib/" + triplet,
		"usr/lib/" + triplet + "/nvidia/current",
		"lib64",
		"lib/" + triplet,
		"lib/" + triplet + "/nvidia/current",
	}
}

// unusualDirs are the ones that it has to be told.
var unusualDirs = []string{
	"usr/local/nvidia/lib64", "usr/local/nvidia/lib", "usr/lib/nvidia", "usr/lib", "lib", "usr/local/lib", "opt/nvidia/lib64",
}

// unusual says whether nvcdi has to be told of the directory that holds the library.
func unusual(driverRoot, libraryPath string) bool {
	for _, dir := range unusualDirs {
		if filepath.Dir(libraryPath) == filepath.Join(driverRoot, dir) {
			return true
		}
	}
	return false
}

// findLibrary returns the path of NVML under the driver root as the plugin sees it. The dynamic linker's own search is not used:
// it would look into the plugin's container.
func findLibrary(p Paths) (string, error) {
	dirs := libraryDirs()
	for _, dir := range dirs {
		path := filepath.Join(p.DriverRoot, dir, libraryName)
		if exists(path) {
			return path, nil
		}
	}
	return "", notReady(
		"install the NVIDIA driver on this node, or set the driver root to where it is installed",
		"%s is not under the driver root %s (looked in %s)", libraryName, p.HostDriverRoot, strings.Join(dirs, ", "))
}
