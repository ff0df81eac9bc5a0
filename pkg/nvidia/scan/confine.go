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
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// confine returns e without what could expose the host, and without what it does not know, and a
// problem for each part left out. The container runtime follows symlinks from the host's root, so a
// symlink out of the driver root would give tenants a host file. A device node with a wrong number
// would open another device. confine also resolves the symlinks in mount sources, so that the
// runtime has none to follow.
func (s scanner) confine(e edits) (edits, []nvidia.Omission) {
	kept := edits{AdditionalGIDs: e.AdditionalGIDs}
	var refused []nvidia.Omission
	refuse := func(name, format string, args ...any) {
		refused = append(refused, nvidia.Omission{Kind: nvidia.RefusedEdit, Name: name, Message: fmt.Sprintf(format, args...)})
	}
	for _, v := range e.Env {
		if name, _, _ := strings.Cut(v, "="); name == "NVIDIA_CTK_LIBCUDA_DIR" { // the hook enable-cuda-compat reads it
			kept.Env = append(kept.Env, v)
		} else {
			refuse(name, "this driver does not know the variable")
		}
	}
	for _, m := range e.Mounts {
		source, err := resolveConfined(s.paths, m.HostPath)
		switch {
		case err != nil:
			refuse(s.paths.Host(m.HostPath), "%v", err)
		case !filepath.IsAbs(m.ContainerPath) || filepath.Clean(m.ContainerPath) != m.ContainerPath:
			refuse(s.paths.Host(m.HostPath), "the container path %q is not absolute", m.ContainerPath)
		default:
			mount := *m
			mount.HostPath = source
			kept.Mounts = append(kept.Mounts, &mount)
		}
	}
	listed, _ := host.Majors(s.paths)
	majors := slices.Collect(maps.Values(listed))
	for _, n := range e.DeviceNodes {
		if err := s.checkNode(n, majors); err != nil {
			refuse(s.paths.Host(cmp.Or(n.HostPath, n.Path)), "%v", err)
			continue
		}
		kept.DeviceNodes = append(kept.DeviceNodes, n)
	}
	for _, h := range e.Hooks {
		if h.Path != s.paths.HookPath {
			refuse(h.Path, "it is not this driver's hook %s", s.paths.HookPath)
			continue
		}
		// Otherwise the runtime would refuse the whole spec.
		if err := (&cdi.ContainerEdits{ContainerEdits: &edits{Hooks: []*specs.Hook{h}}}).Validate(); err != nil {
			refuse(h.HookName, "%v", err)
			continue
		}
		hook := *h
		hook.Args = s.confineLinks(h.Args, kept.Mounts, refuse)
		if len(hook.Args) == len(h.Args) || slices.Contains(hook.Args, linkFlag) {
			kept.Hooks = append(kept.Hooks, &hook)
		}
	}
	if e.IntelRdt != nil {
		refuse("intelRdt", "this driver does not know such an edit")
	}
	if len(e.NetDevices) > 0 {
		refuse("netDevices", "this driver does not know such an edit")
	}
	return kept, refused
}

// linkFlag precedes each symlink in the arguments of the hook create-symlinks.
const linkFlag = "--link"

// confineLinks returns the arguments of a hook without the symlinks that would be outside the
// directories mounted into containers.
func (s scanner) confineLinks(args []string, mounts []*specs.Mount, refuse func(name, format string, args ...any)) []string {
	var kept []string
	for _, arg := range args {
		if _, link, ok := strings.Cut(arg, "::"); ok && !isNextToMount(s.withoutDevRoot(link), mounts) {
			refuse(link, "the symlink would be outside the directories mounted into containers (a library can name it): reinstall the driver")
			if last := len(kept) - 1; last >= 0 && kept[last] == linkFlag {
				kept = kept[:last]
			}
			continue
		}
		kept = append(kept, arg)
	}
	return kept
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
