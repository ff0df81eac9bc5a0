// Package driverroot finds the files of an NVIDIA driver's installation below its root, which need not be the root of this process: the host's root
// seen in a container, a driver container's, a directory that holds libraries and programs and nothing else.
//
// It looks at files only and needs no C library, so that a statically linked program can use it too. It runs nothing and changes nothing.
package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// LibraryDirs are the directories of a driver root that distributions, driver containers and cloud images put the driver's libraries into.
// They are tried in order; the first that holds the library wins.
func LibraryDirs() []string { return append(customaryDirs(), unusualDirs...) }

// customaryDirs are the ones in which the container toolkit looks by itself.
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

// programDirs hold the driver's programs, as LibraryDirs its libraries.
var programDirs = []string{
	"usr/bin", "bin", "usr/lib/nvidia/current", "usr/local/nvidia/bin", "usr/local/bin", "opt/nvidia/bin", "usr/sbin", "sbin",
}

// Unusual says whether the container toolkit has to be told of the directory that holds a library.
func Unusual(root, libraryPath string) bool {
	for _, dir := range unusualDirs {
		if filepath.Dir(libraryPath) == filepath.Join(root, dir) {
			return true
		}
	}
	return false
}

// NVML is the library by which a driver's installation is known.
const NVML = "libnvidia-ml.so.1"

// Library finds NVML. The dynamic linker's own search is not used: it would look below the root of this process.
func Library(root string) (path string, ok bool) {
	for _, dir := range LibraryDirs() {
		if path := filepath.Join(root, dir, NVML); isOwnFile(root, path) {
			return path, true
		}
	}
	return "", false
}

// isOwnFile says whether a path is a file and leads, as the kernel follows it for this process, to the one that it leads to for a process whose root directory
// the driver root is: a link out of the driver root would have this process load something of its own system. A device or pipe would keep it waiting.
func isOwnFile(root, path string) bool {
	leads, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false
	}
	root, err = filepath.EvalSymlinks(root)
	if err != nil {
		return false
	}
	if rest, err := filepath.Rel(root, leads); err != nil || !filepath.IsLocal(rest) {
		return false
	}
	info, err := os.Lstat(leads)
	return err == nil && info.Mode().IsRegular()
}

// Program is a program of the driver's with what it takes to run it here, without a change of the root directory.
type Program struct {
	// Path is the program itself, with no symbolic link that would lead out of the driver root.
	Path string
	// LibraryDir holds the driver's libraries.
	LibraryDir string
}

// Find finds a program of the driver's, such as nvidia-smi.
func Find(root, name string) (Program, error) {
	library, ok := Library(root)
	if !ok {
		return Program{}, fmt.Errorf("%s is not under the driver root %s (looked in %s)", NVML, root, strings.Join(LibraryDirs(), ", "))
	}
	for _, dir := range programDirs {
		path, err := Resolve(root, filepath.Join(dir, name))
		if err != nil {
			continue
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return Program{Path: path, LibraryDir: filepath.Dir(library)}, nil
		}
	}
	return Program{}, fmt.Errorf("%s is not under the driver root %s (looked in %s): %w", name, root, strings.Join(programDirs, ", "), fs.ErrNotExist)
}

// Environment is what the dynamic linker must be told so that the program finds the driver's libraries of the given names (NVML for example).
//
// A directory that also holds a C library must not be searched: the program is run by the linker of this process's own system, which a C library of
// another build does not fit. There each library is named alone; what it asks for itself besides the C library is found only if it is named too.
func (p Program) Environment(libraries ...string) []string {
	if _, err := os.Stat(filepath.Join(p.LibraryDir, "libc.so.6")); err != nil {
		return []string{"LD_LIBRARY_PATH=" + p.LibraryDir}
	}
	var paths []string
	for _, name := range libraries {
		paths = append(paths, filepath.Join(p.LibraryDir, name))
	}
	return []string{"LD_PRELOAD=" + strings.Join(paths, ":")}
}

// maxLinks is how many symbolic links a path may go through, as in the kernel.
const maxLinks = 40

// Resolve follows the symbolic links of a path as a process would for which root is the root directory. An absolute link, such as those of
// Debian's alternatives, would otherwise lead to the files of this process's own system.
func Resolve(root, path string) (string, error) {
	done, rest := "/", strings.Split(filepath.Clean("/" + path)[1:], "/")
	for links := 0; len(rest) > 0; {
		next := filepath.Join(done, rest[0]) // which keeps ".." below the root
		rest = rest[1:]
		info, err := os.Lstat(filepath.Join(root, next))
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			done = next
			continue
		}
		if links++; links > maxLinks {
			return "", &fs.PathError{Op: "resolve", Path: filepath.Join(root, path), Err: errors.New("too many symbolic links")}
		}
		target, err := os.Readlink(filepath.Join(root, next))
		if err != nil {
			return "", err
		}
		if filepath.IsAbs(target) {
			done = "/"
		}
		rest = append(strings.FieldsFunc(target, func(r rune) bool { return r == '/' }), rest...)
	}
	return filepath.Join(root, done), nil
}
