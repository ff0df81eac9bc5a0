// Package driverroot finds an NVIDIA driver's files below the driver root, which is often not this
// process's root. It may be the host's root seen in a container, a driver container's root, or a
// plain directory of libraries and programs.
//
// The package only reads files. It needs no C library, so that a statically linked program can use
// it.
package driverroot

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/thread"
)

// LibraryDirs returns the directories below a driver root where distributions, driver containers
// and cloud images put the libraries. Callers try them in order, and the first directory with the
// library wins.
func LibraryDirs() []string { return append(customaryDirs(), unusualDirs...) }

// customaryDirs returns the library directories that the NVIDIA Container Toolkit searches by
// default.
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

// unusualDirs are library directories that the container toolkit searches only if its configuration
// names them. Those of Bottlerocket, Flatcar and NixOS come last.
var unusualDirs = []string{
	"usr/local/nvidia/lib64", "usr/local/nvidia/lib", "usr/lib/nvidia", "usr/lib", "lib", "usr/local/lib", "opt/nvidia/lib64",
	"usr/lib/nvidia/tesla", "opt/nvidia/current/usr/lib64", "run/opengl-driver/lib",
}

// programDirs are the directories of the driver's programs, in the order in which Find tries them.
var programDirs = []string{
	"usr/bin", "bin", "usr/lib/nvidia/current", "usr/local/nvidia/bin", "usr/local/bin", "opt/nvidia/bin", "opt/bin", "usr/sbin", "sbin",
	"usr/libexec/nvidia/tesla/bin", "run/current-system/sw/bin",
}

// SearchDirs returns the directories below root in which the container toolkit should search the
// libraries of the driver whose NVML is at libraryPath. It returns nothing if those that the
// toolkit searches by default suffice.
func SearchDirs(root, libraryPath string) []string {
	dir, err := filepath.Rel(root, filepath.Dir(libraryPath))
	if err != nil || !filepath.IsLocal(dir) || slices.Contains(customaryDirs(), dir) {
		return nil
	}
	return append([]string{dir}, customaryDirs()...)
}

// NVML is the library whose directory has the driver's libraries.
const NVML = "libnvidia-ml.so.1"

// Library returns the path of NVML below root, without a symlink. It does not use the dynamic
// linker, which would search below this process's root. A device or pipe would block the reader.
func Library(root string) (path string, ok bool) {
	for _, dir := range LibraryDirs() {
		if path, err := Resolve(root, filepath.Join(dir, NVML)); err == nil && isRegular(path) {
			return path, true
		}
	}
	return "", false
}

func isRegular(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}

// DeviceRoot returns the directory whose dev has the driver's device nodes: the driver root or /. A
// driver container has all of them in its own root, and the host has some of them or none. The
// answer can change, because a driver container creates its dev late.
func DeviceRoot(driverRoot string) string {
	for _, names := range [][]string{{"nvidiactl", "nvidia-uvm"}, {"nvidiactl"}} {
		for _, root := range []string{driverRoot, "/"} {
			if hasDeviceNodes(root, names) {
				return root
			}
		}
	}
	return "/"
}

// hasDeviceNodes does not follow symlinks, because nvcdi does not either, and both must find the
// same device nodes.
func hasDeviceNodes(root string, names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool {
		info, err := os.Lstat(filepath.Join(root, "dev", name))
		return err != nil || info.Mode()&os.ModeCharDevice == 0
	})
}

// Program is a program of the driver. It can be run without changing the root directory.
type Program struct {
	// Path is the path of the program. No symlink in it leads out of the driver root.
	Path string
	// LibraryDir is the directory with the driver's libraries.
	LibraryDir string
}

// Find finds a program of the driver by name, such as nvidia-smi.
func Find(root, name string) (Program, error) {
	library, ok := Library(root)
	if !ok {
		return Program{}, fmt.Errorf("%s is not under the driver root %s (looked in %s)",
			NVML, root, strings.Join(LibraryDirs(), ", "))
	}
	for _, dir := range programDirs {
		path, err := Resolve(root, filepath.Join(dir, name))
		if err != nil {
			continue
		}
		// The programs of NixOS need a dynamic linker that only its store has. It keeps the unchanged
		// ones next to them, for containers.
		if original := filepath.Join(filepath.Dir(filepath.Dir(path)), "origBin", name); isRegular(original) {
			path = original
		}
		if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return Program{Path: path, LibraryDir: filepath.Dir(library)}, nil
		}
	}
	return Program{}, fmt.Errorf("%s is not under the driver root %s (looked in %s): %w",
		name, root, strings.Join(programDirs, ", "), fs.ErrNotExist)
}

// Environment returns the environment variables with which the program finds NVML.
//
// The program runs with the dynamic linker of this process's system, which fits no other build's C
// library. So if the directory of the driver's libraries also has a C library, Environment preloads
// NVML instead of searching the directory.
func (p Program) Environment() []string {
	if _, err := os.Stat(filepath.Join(p.LibraryDir, "libc.so.6")); err != nil {
		return []string{"LD_LIBRARY_PATH=" + p.LibraryDir}
	}
	return []string{"LD_PRELOAD=" + filepath.Join(p.LibraryDir, NVML)}
}

// Inside calls f on a thread whose root directory is root, for code that follows symlinks by
// itself. See [Resolve] for a single file. It fails without calling f if this process may not
// change the root directory of its thread. f must do its work on the calling goroutine.
func Inside(root string, f func()) error {
	if root == "/" {
		f()
		return nil
	}
	var err error
	thread.OnSpare(func() {
		if err = unix.Unshare(unix.CLONE_FS); err != nil {
			return
		}
		if err = unix.Chroot(root); err != nil {
			return
		}
		if err = unix.Chdir("/"); err == nil {
			f()
		}
	})
	return err
}

// Resolve follows the symlinks of path as if root were the root directory. Otherwise an absolute
// symlink, such as those of Debian's alternatives, would lead to files of this process's system.
func Resolve(root, path string) (string, error) {
	found, err := securejoin.SecureJoin(root, path)
	if err != nil {
		return "", err
	}
	if _, err := os.Lstat(found); err != nil {
		return "", err
	}
	return found, nil
}
