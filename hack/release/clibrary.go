package main

import (
	"debug/elf"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// loaded are the parts of the C library that NVIDIA's library may load. No program names them.
var loaded = []string{"libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}

// cLibrary returns the dynamic linker and the libraries that the program needs, by their path in
// the image. root is the unpacked C library of the program's architecture.
func cLibrary(program, root string) (map[string]string, error) {
	linker, err := interpreter(program)
	if err != nil {
		return nil, err
	}
	source, _, err := findLibrary(root, path.Base(linker))
	if err != nil {
		return nil, err
	}
	files := map[string]string{linker: source}
	seen := []string{path.Base(linker)}
	for next := append([]string{}, loaded...); ; {
		more, err := imported(program)
		if err != nil {
			return nil, err
		}
		next = append(next, more...)
		next = slices.DeleteFunc(next, func(name string) bool { return slices.Contains(seen, name) })
		if len(next) == 0 {
			return files, nil
		}
		seen = append(seen, next[0])
		source, inImage, err := findLibrary(root, next[0])
		if err != nil {
			return nil, fmt.Errorf("%s needs a library: %w", program, err)
		}
		files[inImage], program = source, source
	}
}

// findLibrary returns the path of a library below root, and its path in the image.
func findLibrary(root, name string) (source, inImage string, err error) {
	for _, pattern := range []string{"lib/*-linux-gnu", "usr/lib/*-linux-gnu"} {
		found, err := filepath.Glob(filepath.Join(root, pattern, name))
		if err != nil {
			return "", "", err
		}
		if len(found) == 1 {
			return found[0], strings.TrimPrefix(found[0], filepath.Clean(root)), nil
		}
	}
	return "", "", fmt.Errorf("%s is not below %s: unpack the C library there with hack/c-library.sh", name, root)
}

// interpreter returns the path of the dynamic linker that the program asks the kernel for.
func interpreter(program string) (string, error) {
	file, err := elf.Open(program)
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	section := file.Section(".interp")
	if section == nil {
		return "", fmt.Errorf("%s is linked statically, but it must load NVIDIA's library", program)
	}
	name, err := section.Data()
	return strings.TrimRight(string(name), "\x00"), err
}

func imported(program string) ([]string, error) {
	file, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return file.ImportedLibraries()
}

// debianPackage is a package that hack/c-library.sh unpacked.
type debianPackage struct {
	Name, Version, Arch, Path string
}

// debianPackages lists the packages in a folder of hack/c-library.sh.
func debianPackages(dir string) ([]debianPackage, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(paths) == 0 {
		return nil, fmt.Errorf("no Debian package in %s: make it with hack/c-library.sh (%w)", dir, os.ErrNotExist)
	}
	var packages []debianPackage
	for _, p := range paths {
		parts := strings.Split(strings.TrimSuffix(filepath.Base(p), ".deb"), "_")
		if len(parts) != 3 {
			return nil, fmt.Errorf("%s is not named NAME_VERSION_ARCH.deb", p)
		}
		packages = append(packages, debianPackage{Name: parts[0], Version: strings.ReplaceAll(parts[1], "%3a", ":"), Arch: parts[2], Path: p})
	}
	return packages, nil
}
