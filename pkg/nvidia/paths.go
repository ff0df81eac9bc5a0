package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// Program finds a program of the driver, such as nvidia-smi, as this process sees it. The error
// wraps [fs.ErrNotExist] if the driver is installed without this program.
func (p Paths) Program(name string) (driverroot.Program, error) {
	p = p.WithDefaults()
	found, err := driverroot.Find(p.DriverRoot, name)
	if errors.Is(err, fs.ErrNotExist) && p.HostDriverRoot != p.DriverRoot {
		err = fmt.Errorf("%w (%s on the host)", err, p.HostDriverRoot)
	}
	return found, err
}

// Paths says where the host's files are. The plugin usually runs in a container and sees parts of
// the host under other paths.
type Paths struct {
	// DriverRoot is where the plugin sees the root of the driver's installation: /driver-root in a
	// container, / on a plain host.
	DriverRoot string `json:"driverRoot"`
	// HostDriverRoot is the path of DriverRoot on the host, such as /, /run/nvidia/driver or
	// /home/kubernetes/bin/nvidia.
	HostDriverRoot string `json:"hostDriverRoot"`
	// DevRoot is the directory, as the plugin sees it, whose subdirectory dev has the driver's
	// device nodes. The path of that subdirectory is accepted too. If it is empty,
	// [driverroot.DeviceRoot] finds it.
	DevRoot string `json:"devRoot,omitempty"`
	// DriverDirs are additional directories with files of the driver, outside the driver root.
	// Their paths are the same for host and plugin.
	DriverDirs []string `json:"driverDirs,omitempty"`
	// Sysfs and Proc are the paths at which the plugin sees the host's /sys and /proc.
	Sysfs string `json:"sysfs"`
	Proc  string `json:"proc"`
	// Cgroups is the mount point of cgroup v2, which is the same for the plugin and the host. If it
	// is empty, the plugin does not detect whether the driver limits memory by cgroup.
	Cgroups string `json:"cgroups,omitempty"`
	// HookPath is the path of nvidia-cdi-hook on the host.
	HookPath string `json:"hookPath"`
	// LdconfigPath is the path of ldconfig on the host, which a hook runs for each container. Empty
	// means /sbin/ldconfig.
	LdconfigPath string `json:"ldconfigPath,omitempty"`
	// Modules is the path at which the plugin sees the host's /lib/modules. Empty means the same path.
	Modules string `json:"modules,omitempty"`
	// State is the plugin's directory for what must survive its process. It has a lock file for each
	// card, which only workers need.
	State string `json:"state,omitempty"`
	// Passthrough says to read from Sysfs which GPUs can be passed to virtual machines.
	Passthrough bool `json:"passthrough,omitempty"`
}

// WithDefaults sets empty fields to the paths of a host on which the plugin runs outside a
// container.
func (p Paths) WithDefaults() Paths {
	p.DriverRoot = cleanOr(p.DriverRoot, "/")
	p.HostDriverRoot = cleanOr(p.HostDriverRoot, p.DriverRoot)
	p.Sysfs = cleanOr(p.Sysfs, "/sys")
	p.Proc = cleanOr(p.Proc, "/proc")
	p.Modules = cleanOr(p.Modules, "/lib/modules")
	p.HookPath = cleanOr(p.HookPath, "/usr/bin/nvidia-cdi-hook")
	return p
}

func cleanOr(path, otherwise string) string {
	return filepath.Clean(cmp.Or(path, otherwise))
}

// DeviceRoot returns the directory whose subdirectory dev has the driver's device nodes. It is
// computed each time, because a driver container creates its dev late.
func (p Paths) DeviceRoot() string {
	if p.DevRoot != "" {
		return filepath.Join("/", strings.TrimSuffix(filepath.Clean(p.DevRoot), "/dev"))
	}
	return driverroot.DeviceRoot(p.DriverRoot)
}

// Host converts the path of a driver file from the plugin's view to the host's. It returns any
// other path unchanged.
func (p Paths) Host(visible string) string {
	if rest, ok := hostfile.Below(p.DriverRoot, visible); ok {
		return filepath.Join(p.HostDriverRoot, rest)
	}
	return visible
}

// Mapper returns a function that converts a host path to the plugin's view: driver files below the
// driver root, device nodes below the dev root. The hook and everything below the directories in
// same have the same path in both.
func (p Paths) Mapper(same ...string) func(host string) string {
	p = p.WithDefaults()
	same = append(same, p.HookPath)
	below := func(path, root string) bool { return strings.HasPrefix(path+"/", strings.TrimSuffix(root, "/")+"/") }
	return func(host string) string {
		host = filepath.Clean(host)
		switch {
		case p.DriverRoot == p.HostDriverRoot || !below(host, p.HostDriverRoot):
			return host
		case slices.ContainsFunc(same, func(dir string) bool { return below(host, dir) }):
			return host
		case p.HostDriverRoot == "/" && below(host, "/dev") && p.DeviceRoot() == "/":
			return host
		}
		return filepath.Join(p.DriverRoot, strings.TrimPrefix(host, p.HostDriverRoot))
	}
}
