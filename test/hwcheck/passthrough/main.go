// Passthrough prints what sysfs says about passing GPUs to virtual machines. Its arguments are the
// folder of sysfs and the GPUs' PCI addresses. It needs no NVIDIA driver.
//
// It is a program of its own because it is large, and hwcheck's folder has its programs compressed.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: passthrough SYSFS ADDRESS...")
		os.Exit(2)
	}
	aliases := "/lib/modules/unknown/modules.alias"
	var names unix.Utsname
	if unix.Uname(&names) == nil {
		aliases = filepath.Join("/lib/modules", unix.ByteSliceToString(names.Release[:]), "modules.alias")
	}
	for _, address := range os.Args[2:] {
		fmt.Println(describe(os.Args[1], device.PCIAddress(address), aliases))
	}
}

func describe(sysfs string, gpu device.PCIAddress, aliases string) string {
	g, err := vfio.Read(sysfs, gpu)
	if err != nil {
		return fmt.Sprintf("%s: %v", gpu, err)
	}
	return describeGroup(g, aliases)
}

// describeGroup says whether the GPU could be passed to a virtual machine, and with which functions
// and module. aliases is the path of modules.alias.
func describeGroup(g vfio.Group, aliases string) string {
	verdict := "could be offered"
	if g.GPU.Bound() {
		verdict = "could be offered, and is bound already"
	}
	if refusal := g.Refusal(); refusal != "" {
		verdict = "could not be offered: " + refusal
	}
	module, err := moduleFor(g.GPU, aliases)
	if err != nil {
		module = err.Error()
	}
	text := fmt.Sprintf("%s %s\n  driver %q, override %q, group %d, reset methods %q, module %s", g.GPU.Address, verdict,
		g.GPU.Driver, g.GPU.Override, g.Number, g.ResetMethods, module)
	for _, c := range g.Companions {
		text += fmt.Sprintf("\n  with %s (class %04x, driver %q)", c.Address, c.Class, c.Driver)
	}
	return text
}

func moduleFor(f vfio.Function, aliases string) (string, error) {
	lines, err := os.ReadFile(aliases)
	if errors.Is(err, fs.ErrNotExist) {
		return "unknown (no " + aliases + ")", nil
	}
	if err != nil {
		return "", err
	}
	return vfio.Module(string(lines), f)
}
