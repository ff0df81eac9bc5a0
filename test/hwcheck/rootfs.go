package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// makeRootfs creates the root file system of a container in root. It contains empty folders, and
// the machine's C library as far as the programs need it. All files of the driver must come from
// the CDI spec.
func makeRootfs(root string, programs ...string) error {
	for _, folder := range []string{"dev", "proc", "sys", "tmp", "etc", "run", "usr/bin", "usr/lib", "var"} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil { //nolint:gosec // a container's folders
			return err
		}
	}
	c := closure{root: root, copied: map[string]bool{}}
	for _, program := range programs {
		if err := c.needs(program); err != nil {
			return fmt.Errorf("collect the C library for %s: %w", program, err)
		}
	}
	return nil
}

// closure copies the libraries that programs need, and the libraries that those need, into root.
type closure struct {
	root   string
	copied map[string]bool
}

func (c *closure) needs(path string) error {
	file, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if interpreter, err := interpreterOf(file); err != nil {
		return err
	} else if interpreter != "" {
		if err := c.copy(interpreter); err != nil {
			return err
		}
	}
	libraries, err := file.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, library := range libraries {
		if strings.HasPrefix(library, "libnvidia") || strings.HasPrefix(library, "libcuda") {
			continue // the CDI spec must mount this library
		}
		found, err := c.find(library, file)
		if err != nil {
			return err
		}
		if c.copied[found] {
			continue
		}
		if err := c.copy(found); err != nil {
			return err
		}
		if err := c.needs(found); err != nil {
			return err
		}
	}
	return nil
}

func interpreterOf(file *elf.File) (string, error) {
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			name, err := io.ReadAll(segment.Open())
			return strings.TrimRight(string(name), "\x00"), err
		}
	}
	return "", nil
}

// find returns the path of a library that the program or library wantedBy needs. It searches
// glibc's default folders, because the loader in the container will search the same folders. It
// skips libraries of another architecture.
func (c *closure) find(library string, wantedBy *elf.File) (string, error) {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	for _, folder := range []string{"/lib/" + triplet, "/usr/lib/" + triplet, "/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
		path := filepath.Join(folder, library)
		candidate, err := elf.Open(path)
		if err != nil {
			continue
		}
		fits := candidate.Machine == wantedBy.Machine && candidate.Class == wantedBy.Class
		_ = candidate.Close()
		if fits {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is in none of this machine's library folders", library)
}

func (c *closure) copy(path string) error {
	if c.copied[path] {
		return nil
	}
	c.copied[path] = true
	return copyFile(path, filepath.Join(c.root, path))
}

// copyFile copies a library or program, and creates the folders of the copy.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { //nolint:gosec // a container's folders
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755) //nolint:gosec // a library
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
