package nvidia

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// What is found below the driver root is mounted into tenants' containers, by a runtime that follows links from the root of the host: a link out of the driver
// root would show them a file of the node's, and a device node with another number another device. confine refuses both. It makes the sources of mounts what
// their links lead to, so that the runtime has none to follow.
func (s scanner) confine(e edits) error {
	for _, m := range e.Mounts {
		source, err := s.paths.confined(m.HostPath)
		if err != nil {
			return err
		}
		if !filepath.IsAbs(m.ContainerPath) || filepath.Clean(m.ContainerPath) != m.ContainerPath {
			return fmt.Errorf("%s would be mounted at %q, which is no absolute path", s.paths.host(m.HostPath), m.ContainerPath)
		}
		m.HostPath = source
	}
	for _, h := range e.Hooks {
		for _, arg := range h.Args {
			if _, link, ok := strings.Cut(arg, "::"); ok && !besideMounts(s.withoutDevRoot(link), e.Mounts) {
				return fmt.Errorf("the link %s would be made in containers, outside the directories of what is mounted there (a library can name it): reinstall the driver", link)
			}
		}
	}
	majors := kernelMajors(s.paths.Proc)
	for _, n := range e.DeviceNodes {
		if err := s.checkNode(n, majors); err != nil {
			return err
		}
	}
	return nil
}

// confined is the file that a path which the plugin sees stands for, seen as the plugin sees it. It lies in the driver root, with all links followed as if that
// were the root, or in one of the directories that an admin has named beside it.
func (p Paths) confined(path string) (string, error) {
	var source string
	var err error
	if rest, ok := below(p.DriverRoot, path); ok {
		source, err = driverroot.Resolve(p.DriverRoot, rest)
	} else if source, err = filepath.EvalSymlinks(path); err == nil && !p.besides(source) {
		return "", fmt.Errorf("%s leads out of the driver root %s: put the file there, or name its directory (--driver-dirs)", source, p.HostDriverRoot)
	}
	if err != nil {
		return "", fmt.Errorf("%s leads to no file within the driver root %s (%w): remove it, or reinstall the driver", p.host(path), p.HostDriverRoot, err)
	}
	info, err := os.Lstat(source)
	if err != nil {
		return "", fmt.Errorf("look at what %s leads to: %w", p.host(path), err)
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("%s is no file but %s: remove it, or reinstall the driver", p.host(path), info.Mode().Type())
	}
	return source, nil
}

// besideMounts says whether a link that a hook makes in a container is below /dev, or below a directory that something is mounted into: the names of links come
// from within libraries, and "../" in one must not lead elsewhere.
func besideMounts(link string, mounts []*specs.Mount) bool {
	if !filepath.IsAbs(link) || filepath.Clean(link) != link {
		return false
	}
	if _, ok := below("/dev", link); ok {
		return true
	}
	for _, m := range mounts {
		dir := filepath.Dir(m.ContainerPath)
		if _, ok := below(dir, link); ok && dir != "/" {
			return true
		}
	}
	return false
}

func (p Paths) besides(path string) bool {
	for _, dir := range p.DriverDirs {
		if _, ok := below(filepath.Clean(dir), path); ok {
			return true
		}
	}
	return false
}

func (s scanner) checkNode(n *specs.DeviceNode, majors map[uint32]bool) error {
	path := n.HostPath
	if path == "" {
		path = n.Path
	}
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("look at the device node %s: %w", s.paths.host(path), err)
	}
	if info.Mode()&fs.ModeCharDevice == 0 {
		return fmt.Errorf("%s is no character device: remove it and run nvidia-modprobe", s.paths.host(path))
	}
	if err := checkNumber(filepath.Base(path), deviceNumber(info), majors); err != nil {
		return fmt.Errorf("device node %s: %w: remove it and run nvidia-modprobe", s.paths.host(path), err)
	}
	return nil
}

var numbered = regexp.MustCompile(`^nvidia([0-9]+)$`)

const (
	majorDRM     = 226 // of every DRM driver, as Linux's list of device numbers has it
	minorControl = 255 // of /dev/nvidiactl
)

// checkNumber holds a device node's number against what the kernel has given to drivers of NVIDIA's. Where it lists none, in a sandbox for example, nothing is known.
func checkNumber(name string, number uint64, majors map[uint32]bool) error {
	if len(majors) == 0 {
		return nil
	}
	major, minor := unix.Major(number), unix.Minor(number)
	if major != majorDRM && !majors[major] {
		return fmt.Errorf("its number %d:%d is none of the NVIDIA driver's", major, minor)
	}
	want := minor
	if m := numbered.FindStringSubmatch(name); m != nil {
		n, err := strconv.ParseUint(m[1], 10, 20)
		if err != nil {
			return fmt.Errorf("its name is none that the driver gives: %w", err)
		}
		want = uint32(n)
	} else if name == "nvidiactl" {
		want = minorControl
	}
	if want != minor {
		return fmt.Errorf("its number is %d:%d, another device's than its name says", major, minor)
	}
	return nil
}

// kernelMajors are the major numbers that the kernel has given to drivers of NVIDIA's.
func kernelMajors(proc string) map[uint32]bool {
	data, err := os.ReadFile(filepath.Join(proc, "devices"))
	if err != nil {
		return nil
	}
	characters, _, _ := strings.Cut(string(data), "Block devices:")
	majors := map[uint32]bool{}
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 || !strings.HasPrefix(fields[1], "nvidia") {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 12); err == nil {
			majors[uint32(n)] = true
		}
	}
	return majors
}
