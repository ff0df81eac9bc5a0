package vfio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// modulesAlias reads modules.alias of the running kernel. It is empty if there is no such file.
func modulesAlias(modules string) (string, error) {
	var names unix.Utsname
	if err := unix.Uname(&names); err != nil {
		return "", err
	}
	aliases, err := os.ReadFile(filepath.Join(modules, unix.ByteSliceToString(names.Release[:]), "modules.alias"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(aliases), err
}

// plainModule is the VFIO driver for every PCI function.
const plainModule = "vfio_pci"

// Module returns the kernel module with the VFIO driver that fits the function best: of the lines
// "alias vfio_pci:<pattern> <module>" in the host's modules.alias that match the function, the one
// with the fewest wildcards, as the kernel's documentation asks of those that bind functions
// (Documentation/driver-api/vfio.rst). Built-in modules have no line, so it is vfio_pci if no line
// matches.
func Module(modulesAlias string, f Function) (string, error) {
	alias, ok := strings.CutPrefix(f.ModAlias, "pci:")
	if !ok {
		return "", fmt.Errorf("PCI function %s has alias %q, which does not begin with \"pci:\"", f.Address, f.ModAlias)
	}
	module, least := plainModule, -1
	for line := range strings.Lines(modulesAlias) {
		words := strings.Fields(line)
		if len(words) != 3 || words[0] != "alias" {
			continue
		}
		pattern, ok := strings.CutPrefix(words[1], "vfio_pci:")
		if !ok {
			continue
		}
		matches, err := path.Match(pattern, alias)
		if err != nil {
			return "", fmt.Errorf("modules.alias: pattern %q: %w", words[1], err)
		}
		if n := strings.Count(pattern, "*"); matches && (least < 0 || n < least) {
			module, least = words[2], n
		}
	}
	return module, nil
}
