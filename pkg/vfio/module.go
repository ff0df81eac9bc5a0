package vfio

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// modulesAlias reads modules.alias of the running kernel. It is empty if there is no such file.
func modulesAlias(modules string) ([]byte, error) {
	var names unix.Utsname
	if err := unix.Uname(&names); err != nil {
		return nil, err
	}
	aliases, err := os.ReadFile(filepath.Join(modules, unix.ByteSliceToString(names.Release[:]), "modules.alias"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return aliases, err
}

// plainModule is the VFIO driver for every PCI function.
const plainModule = "vfio_pci"

// Module returns the kernel module with the VFIO driver that fits the function best: of the lines
// "alias vfio_pci:<pattern> <module>" in the host's modules.alias that match the function, the one
// with the fewest wildcards, as the kernel's documentation asks of those that bind functions
// (Documentation/driver-api/vfio.rst). Built-in modules have no line, so it is vfio_pci if no line
// matches.
func Module(modulesAlias io.Reader, f Function) (string, error) {
	alias, ok := strings.CutPrefix(f.ModAlias, "pci:")
	if !ok {
		return "", fmt.Errorf("PCI function %s has alias %q, which does not begin with \"pci:\"", f.Address, f.ModAlias)
	}
	module, least := plainModule, -1
	lines := bufio.NewScanner(modulesAlias)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
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
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("read modules.alias: %w", err)
	}
	return module, nil
}
