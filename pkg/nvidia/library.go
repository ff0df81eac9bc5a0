package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// findLibrary returns the path of the NVML library under the driver root, as this process sees it.
func findLibrary(p Paths) (string, error) {
	if path, ok := driverroot.Library(p.DriverRoot); ok {
		return path, nil
	}
	return "", notReady(
		"install the NVIDIA driver on this node, or set the driver root to where it is installed",
		"%s is not under the driver root %s (looked in %s)", driverroot.NVML, p.HostDriverRoot, strings.Join(driverroot.LibraryDirs(), ", "))
}

// Program finds a program of the driver, such as nvidia-smi, as this process sees it. The error
// wraps [fs.ErrNotExist] if the driver is installed without this program.
func (p Paths) Program(name string) (driverroot.Program, error) {
	p = p.withDefaults()
	found, err := driverroot.Find(p.DriverRoot, name)
	if errors.Is(err, fs.ErrNotExist) && p.HostDriverRoot != p.DriverRoot {
		err = fmt.Errorf("%w (%s on the host)", err, p.HostDriverRoot)
	}
	return found, err
}
