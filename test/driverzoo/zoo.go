// Package driverzoo lays out driver roots as distributions, driver containers and node images have
// them: directories, links, modes and device nodes. What a root consists of is data, in roots/ and
// driver.yaml, with its source.
//
// The files are placeholders. A test that runs the driver's programs gives the files to copy.
package driverzoo

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

//go:embed driver.yaml roots/*.yaml
var data embed.FS

// driver are the files of a driver, whatever their places.
type driver struct {
	Libraries map[string]string `json:"libraries"` // the suffix of the soname by the library's name
	Platforms map[string]string `json:"platforms"` // the version by the library's name
	Programs  []string          `json:"programs"`
	Firmware  []string          `json:"firmware"`
}

// Root says where a kind of host has the driver's files. Paths are below the driver root. They may
// contain ${version}, ${triplet} and ${cpu}.
type Root struct {
	Name string `json:"-"`
	// Proof is "packaging" if the paths come from the sources, or "inferred".
	Proof   string   `json:"proof"`
	Sources []string `json:"sources"`
	// DriverRoot is the driver root's path on the host.
	DriverRoot string `json:"driverRoot"`
	// Libraries, Platforms, Programs and Firmware are the directories of such files. An empty
	// Platforms means that the host lacks the EGL platform libraries, an empty Firmware the firmware.
	Libraries string `json:"libraries"`
	Platforms string `json:"platforms,omitempty"`
	Programs  string `json:"programs"`
	Firmware  string `json:"firmware,omitempty"`
	// Without are the driver's files that this host lacks.
	Without []string `json:"without,omitempty"`
	// Files are other files with their modes, Links are symbolic links with their targets.
	// Alternatives are links over /etc/alternatives.
	Files        map[string]string `json:"files,omitempty"`
	Links        map[string]string `json:"links,omitempty"`
	Alternatives map[string]string `json:"alternatives,omitempty"`
	Devices      Devices           `json:"devices"`
	// Mounts are the files that containers should get, by their path in the container, in addition to
	// the libraries, the firmware, and the programs in Programs if that is a directory like /usr/bin.
	Mounts map[string]string `json:"mounts,omitempty"`
	// NoFirmware says that containers get no firmware, because it is in no directory of the kernel's.
	NoFirmware bool `json:"noFirmware,omitempty"`
	// Missing are the files that every complete driver has and this host lacks.
	Missing []string `json:"missing,omitempty"`

	driver driver
}

// Devices are the modes and groups of the device nodes.
type Devices struct {
	// Root is "driver" if the driver root has the device nodes. Otherwise the host has them.
	Root     string `json:"root,omitempty"`
	GPUMode  string `json:"gpuMode"`
	GPUGroup string `json:"gpuGroup,omitempty"`
	// DRMMode is empty on a host without DRM nodes. Their group is render, for the cards video.
	DRMMode string `json:"drmMode,omitempty"`
}

// Groups are the group IDs of Debian. Distributions differ in the one of render.
var Groups = map[string]int{"video": 44, "render": 104}

// All returns the roots by name. version is the driver's version.
func All(version string) ([]Root, error) {
	replace := strings.NewReplacer("${version}", version, "${triplet}", triplet(), "${cpu}", cpu())
	read := func(name string, to any) error {
		content, err := data.ReadFile(name)
		if err != nil {
			return err
		}
		if err := yaml.UnmarshalStrict([]byte(replace.Replace(string(content))), to); err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		return nil
	}
	var files driver
	if err := read("driver.yaml", &files); err != nil {
		return nil, err
	}
	versioned := map[string]string{}
	for name, soname := range files.Libraries {
		versioned[name+".so."+version] = soname
	}
	files.Libraries = versioned
	names, err := fs.Glob(data, "roots/*.yaml")
	if err != nil {
		return nil, err
	}
	var all []Root
	for _, name := range names {
		r := Root{Name: strings.TrimSuffix(path.Base(name), ".yaml"), driver: files}
		if err := read(name, &r); err != nil {
			return nil, err
		}
		if r.Proof != "packaging" && r.Proof != "inferred" || len(r.Sources) == 0 {
			return nil, fmt.Errorf("%s: its proof is %q, from %v", name, r.Proof, r.Sources)
		}
		all = append(all, r)
	}
	return all, nil
}

func cpu() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64"
	}
	return "x86_64"
}

func triplet() string { return cpu() + "-linux-gnu" }

// Install lays out the root in the directory host, which stands for /. copyOf returns the path of a
// file to copy to the driver's file with this name, or nothing for a placeholder.
func (r Root) Install(host string, copyOf func(name string) string) error {
	root := filepath.Join(host, r.DriverRoot)
	// The links come first, since other paths lead through them.
	for _, p := range slices.Sorted(maps.Keys(r.Links)) {
		if err := link(r.Links[p], filepath.Join(root, p)); err != nil {
			return err
		}
	}
	for name, soname := range r.driver.Libraries {
		if r.lacks(name) {
			continue
		}
		if err := place(filepath.Join(root, r.Libraries, name), 0o755, copyOf(name)); err != nil {
			return err
		}
		base, _, _ := strings.Cut(name, ".so.")
		if soname != "" {
			if err := link(name, filepath.Join(root, r.Libraries, base+".so."+soname)); err != nil {
				return err
			}
		}
	}
	if err := link("libcuda.so.1", filepath.Join(root, r.Libraries, "libcuda.so")); err != nil {
		return err
	}
	modes := map[string]string{}
	for name, version := range r.driver.Platforms {
		if r.Platforms != "" {
			modes[path.Join(r.Platforms, name+".so."+version)] = "0755"
		}
	}
	for _, name := range r.driver.Programs {
		if !r.lacks(name) {
			modes[path.Join(r.Programs, name)] = "0755"
		}
	}
	for _, name := range r.firmware() {
		modes[path.Join(r.Firmware, name)] = "0644"
	}
	maps.Copy(modes, r.Files)
	for p, text := range modes {
		mode, err := parseMode(text)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if err := place(filepath.Join(root, p), mode, copyOf(path.Base(p))); err != nil {
			return err
		}
	}
	for p, target := range r.Alternatives {
		name := "/etc/alternatives/nvidia--" + path.Base(p)
		if err := errors.Join(link(name, filepath.Join(root, p)), link(target, filepath.Join(root, name))); err != nil {
			return err
		}
	}
	return nil
}

func (r Root) firmware() []string {
	if r.Firmware == "" {
		return nil
	}
	return r.driver.Firmware
}

func (r Root) lacks(name string) bool {
	base, _, _ := strings.Cut(name, ".so.")
	return slices.Contains(r.Without, base)
}

// Wanted returns the paths on the host of the files that containers should get, by their paths in
// the container.
func (r Root) Wanted() map[string]string {
	wanted := map[string]string{}
	add := func(p string) { wanted[p] = path.Join(r.DriverRoot, p) }
	for name := range r.driver.Libraries {
		if !r.lacks(name) {
			add(path.Join(r.Libraries, name))
		}
	}
	for name, version := range r.driver.Platforms {
		if r.Platforms != "" {
			add(path.Join(r.Platforms, name+".so."+version))
		}
	}
	if slices.Contains([]string{"/usr/bin", "/usr/local/bin", "/bin"}, r.Programs) {
		for _, name := range r.driver.Programs {
			add(path.Join(r.Programs, name))
		}
	}
	if !r.NoFirmware {
		for _, name := range r.firmware() {
			p := path.Join(r.Firmware, name)
			wanted["/lib/firmware/"+p[strings.Index(p, "/firmware/")+len("/firmware/"):]] = path.Join(r.DriverRoot, p)
		}
	}
	for inside, p := range r.Mounts {
		wanted[inside] = path.Join(r.DriverRoot, p)
	}
	return wanted
}

// ControlGroups returns the groups whose members alone may open the control device nodes.
func (r Root) ControlGroups() []uint32 {
	if r.Devices.GPUGroup == "" {
		return nil
	}
	return []uint32{uint32(Groups[r.Devices.GPUGroup])} //nolint:gosec // a constant
}

// DeviceRoot returns the directory below host whose dev has the device nodes.
func (r Root) DeviceRoot(host string) string {
	if r.Devices.Root == "driver" {
		return filepath.Join(host, r.DriverRoot)
	}
	return host
}

// MakeDevices creates the device nodes of a host with one GPU, which needs root. gpu is its PCI
// address, and number returns the device number by the node's name. The kernel makes DRM nodes in
// the host's /dev, whatever has the others.
func (r Root) MakeDevices(host, gpu string, number func(name string) int) error {
	create := func(dev, name, mode, group string) error {
		full := filepath.Join(dev, name)
		bits, err := parseMode(mode)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		return errors.Join(unix.Mknod(full, unix.S_IFCHR|uint32(bits), number(name)), os.Chmod(full, bits), os.Chown(full, 0, Groups[group]))
	}
	var failed []error
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0"} {
		failed = append(failed, create(filepath.Join(r.DeviceRoot(host), "dev"), name, r.Devices.GPUMode, r.Devices.GPUGroup))
	}
	if r.Devices.DRMMode != "" {
		dri := filepath.Join(host, "dev", "dri")
		failed = append(failed, create(dri, "card0", r.Devices.DRMMode, "video"), create(dri, "renderD128", r.Devices.DRMMode, "render"),
			link("../card0", filepath.Join(dri, "by-path", "pci-"+gpu+"-card")),
			link("../renderD128", filepath.Join(dri, "by-path", "pci-"+gpu+"-render")))
	}
	return errors.Join(failed...)
}

func parseMode(text string) (fs.FileMode, error) {
	mode, err := strconv.ParseUint(text, 8, 12)
	return fs.FileMode(mode), err
}

// place creates a file with its directories. A link in its path leads below the same directory, as
// all links of the roots do that other paths lead through.
func place(full string, mode fs.FileMode, source string) error {
	content := []byte("no ELF")
	if source != "" {
		var err error
		if content, err = os.ReadFile(source); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(full, content, mode), os.Chmod(full, mode))
}

func link(target, full string) error {
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		return err
	}
	return os.Symlink(target, full)
}
