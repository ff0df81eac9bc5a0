package scan

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// confine returns an error if e could expose the host. The container runtime follows symlinks from
// the host's root, so a symlink out of the driver root would give tenants a host file. A device
// node with a wrong number would open another device. confine also resolves the symlinks in mount
// sources, so that the runtime has none to follow.
func (s scanner) confine(e edits) error {
	for _, m := range e.Mounts {
		source, err := resolveConfined(s.paths, m.HostPath)
		if err != nil {
			return err
		}
		if !filepath.IsAbs(m.ContainerPath) || filepath.Clean(m.ContainerPath) != m.ContainerPath {
			return fmt.Errorf("mount %s: the container path %q is not absolute", s.paths.Host(m.HostPath), m.ContainerPath)
		}
		m.HostPath = source
	}
	for _, h := range e.Hooks {
		for _, arg := range h.Args {
			if _, link, ok := strings.Cut(arg, "::"); ok && !isNextToMount(s.withoutDevRoot(link), e.Mounts) {
				return fmt.Errorf("symlink %s would be outside the directories mounted into containers (a library can name it): "+
					"reinstall the driver", link)
			}
		}
	}
	listed, _ := host.Majors(s.paths)
	majors := slices.Collect(maps.Values(listed))
	for _, n := range e.DeviceNodes {
		if err := s.checkNode(n, majors); err != nil {
			return err
		}
	}
	return nil
}

// resolveConfined follows the symlinks of path and returns the path of the file. Both are as this
// process sees them. The file must be in the driver root, whose symlinks are resolved as if it were
// /, or in one of the configured DriverDirs.
func resolveConfined(p nvidia.Paths, path string) (string, error) {
	var source string
	var err error
	if rest, ok := hostfile.Below(p.DriverRoot, path); ok {
		source, err = driverroot.Resolve(p.DriverRoot, rest)
	} else if source, err = filepath.EvalSymlinks(path); err == nil && !inDriverDirs(p, source) {
		return "", fmt.Errorf("%s leads out of the driver root %s: put the file there, or name its directory (--driver-dirs)",
			source, p.HostDriverRoot)
	}
	if err != nil {
		return "", fmt.Errorf("%s leads to no file within the driver root %s (%w): remove it, or reinstall the driver",
			p.Host(path), p.HostDriverRoot, err)
	}
	info, err := os.Lstat(source)
	if err != nil {
		return "", fmt.Errorf("stat the target of %s: %w", p.Host(path), err)
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("%s is not a file but %s: remove it, or reinstall the driver", p.Host(path), info.Mode().Type())
	}
	return source, nil
}

// isNextToMount reports whether the symlink that a hook creates is below /dev or below a mounted
// directory. Library files determine the link's path, and "../" in it must not lead elsewhere.
func isNextToMount(link string, mounts []*specs.Mount) bool {
	if !filepath.IsAbs(link) || filepath.Clean(link) != link {
		return false
	}
	if _, ok := hostfile.Below("/dev", link); ok {
		return true
	}
	for _, m := range mounts {
		dir := filepath.Dir(m.ContainerPath)
		if _, ok := hostfile.Below(dir, link); ok && dir != "/" {
			return true
		}
	}
	return false
}

func inDriverDirs(p nvidia.Paths, path string) bool {
	for _, dir := range p.DriverDirs {
		if _, ok := hostfile.Below(filepath.Clean(dir), path); ok {
			return true
		}
	}
	return false
}

func (s scanner) checkNode(n *specs.DeviceNode, majors []uint32) error {
	path := cmp.Or(n.HostPath, n.Path)
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("stat device node %s: %w", s.paths.Host(path), err)
	}
	if info.Mode()&fs.ModeCharDevice == 0 {
		return fmt.Errorf("%s is not a character device: remove it and run nvidia-modprobe", s.paths.Host(path))
	}
	if err := checkNumber(filepath.Base(path), hostfile.DeviceNumber(info), majors); err != nil {
		return fmt.Errorf("device node %s: %w: remove it and run nvidia-modprobe", s.paths.Host(path), err)
	}
	return nil
}

var numbered = regexp.MustCompile(`^(nvidia|card|renderD)([0-9]+)$`)

const (
	majorDRM     = 226 // major number of all DRM devices (Linux device list)
	minorControl = 255 // minor number of /dev/nvidiactl
)

// checkNumber returns an error if number belongs to no NVIDIA device, or for a DRM device's name to
// no DRM device, or if its minor number does not fit the name of the device node. majors are
// NVIDIA's major numbers. If they are unknown, as in a sandbox, every number is accepted.
func checkNumber(name string, number uint64, majors []uint32) error {
	if len(majors) == 0 {
		return nil
	}
	major, minor := unix.Major(number), unix.Minor(number)
	m := numbered.FindStringSubmatch(name)
	if graphics := m != nil && m[1] != "nvidia"; graphics && major != majorDRM || !graphics && !slices.Contains(majors, major) {
		return fmt.Errorf("its number %d:%d does not belong to the NVIDIA driver", major, minor)
	}
	want := minor
	if m != nil {
		n, err := strconv.ParseUint(m[2], 10, 20)
		if err != nil {
			return fmt.Errorf("the driver does not use this name: %w", err)
		}
		want = uint32(n)
	} else if name == "nvidiactl" {
		want = minorControl
	}
	if want != minor {
		return fmt.Errorf("its number %d:%d does not match its name", major, minor)
	}
	return nil
}
