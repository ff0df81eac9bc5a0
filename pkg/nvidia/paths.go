package nvidia

import (
	"os"
	"path/filepath"
	"strings"
)

// Paths says where the host's files are. The plugin usually runs in a container and sees parts of the host under other names.
type Paths struct {
	// DriverRoot is where the plugin sees the root of the driver's installation: /driver-root in a container, / on a plain host.
	DriverRoot string `json:"driverRoot"`
	// HostDriverRoot is the same directory as the host sees it: /, /run/nvidia/driver, /home/kubernetes/bin/nvidia.
	HostDriverRoot string `json:"hostDriverRoot"`
	// DevRoot is the directory, as the plugin sees it, whose dev holds the driver's device nodes (that dev itself is accepted too).
	// Empty means: the driver root if its dev holds nvidiactl, else /.
	DevRoot string `json:"devRoot,omitempty"`
	// DriverDirs are directories outside the driver root, the same for host and plugin, in which files of the driver may lie too.
	DriverDirs []string `json:"driverDirs,omitempty"`
	// Sysfs and Proc are where the plugin sees the host's /sys and /proc.
	Sysfs string `json:"sysfs"`
	Proc  string `json:"proc"`
	// Cgroups is where cgroup v2 is mounted, for the plugin and for the host. Empty means that containers' limits of memory are not looked for.
	Cgroups string `json:"cgroups,omitempty"`
	// HookPath is where the host keeps nvidia-cdi-hook.
	HookPath string `json:"hookPath"`
}

// withDefaults fills what a plain host leaves unsaid.
func (p Paths) withDefaults() Paths {
	p.DriverRoot = cleanOr(p.DriverRoot, "/")
	p.HostDriverRoot = cleanOr(p.HostDriverRoot, p.DriverRoot)
	p.Sysfs = cleanOr(p.Sysfs, "/sys")
	p.Proc = cleanOr(p.Proc, "/proc")
	p.HookPath = cleanOr(p.HookPath, "/usr/bin/nvidia-cdi-hook")
	return p
}

func cleanOr(path, otherwise string) string {
	if path == "" {
		path = otherwise
	}
	return filepath.Clean(path)
}

// devRoot is the directory whose dev holds the device nodes. It is looked up each time: a driver container brings its dev late.
func (p Paths) devRoot() string {
	if p.DevRoot != "" {
		return filepath.Join("/", strings.TrimSuffix(filepath.Clean(p.DevRoot), "/dev"))
	}
	if isCharDevice(filepath.Join(p.DriverRoot, "dev", "nvidiactl")) {
		return p.DriverRoot
	}
	return "/"
}

// host names a path that the plugin sees as the host names it.
func (p Paths) host(visible string) string {
	if rest, ok := below(p.DriverRoot, visible); ok {
		return filepath.Join(p.HostDriverRoot, rest)
	}
	return visible
}

// Visible is where the plugin sees a host path: the driver's files under the driver root, device nodes under the dev root,
// all else (the hook, the CDI directory) under the same name.
func (p Paths) Visible(host string) string {
	p = p.withDefaults()
	if p.DriverRoot == p.HostDriverRoot {
		return host
	}
	if filepath.Clean(host) == p.HookPath {
		return host
	}
	if p.HostDriverRoot != "/" {
		if rest, ok := below(p.HostDriverRoot, host); ok {
			return filepath.Join(p.DriverRoot, rest)
		}
		return host
	}
	if _, ok := below("/dev", host); ok && p.devRoot() == "/" {
		return host
	}
	return filepath.Join(p.DriverRoot, host)
}

// below cuts root off path, at a path separator only.
func below(root, path string) (rest string, ok bool) {
	if root == "/" {
		return path, strings.HasPrefix(path, "/")
	}
	if path == root {
		return "/", true
	}
	return strings.CutPrefix(path, root+"/")
}

// isCharDevice does not follow links: nvcdi, which must find the same nodes, doesn't either.
func isCharDevice(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
