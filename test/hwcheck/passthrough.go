package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// showPassthrough adds to the report what sysfs says about passing each GPU to a virtual machine.
// It needs no NVIDIA driver.
func (s *visit) showPassthrough() {
	aliases := "/lib/modules/unknown/modules.alias"
	var names unix.Utsname
	if unix.Uname(&names) == nil {
		aliases = filepath.Join("/lib/modules", unix.ByteSliceToString(names.Release[:]), "modules.alias")
	}
	var text strings.Builder
	for _, f := range s.report.Machine.PCI {
		g, err := vfio.Read(s.sysfs, device.PCIAddress(f.Address))
		if err != nil {
			fmt.Fprintf(&text, "%s: %v\n", f.Address, err)
			continue
		}
		fmt.Fprintf(&text, "%s\n", describeGroup(g, aliases))
	}
	s.show("Passthrough to virtual machines, by sysfs", "", text.String())
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
	file, err := os.Open(aliases)
	if errors.Is(err, fs.ErrNotExist) {
		return "unknown (no " + aliases + ")", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	return vfio.Module(file, f)
}
