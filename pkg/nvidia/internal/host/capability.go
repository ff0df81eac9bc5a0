package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// instanceFolder returns the /proc directory of a GPU instance's capability files. Each file names
// the minor number of a device node, and a process that can open this device node may use the GPU
// instance. The kernel does not create the device node:
// https://docs.nvidia.com/datacenter/tesla/mig-user-guide/device-nodes-and-capabilities.html.
func instanceFolder(p nvidia.Paths, gpuMinor int, instance uint32) string {
	return filepath.Join(p.Proc, "driver", "nvidia", "capabilities", fmt.Sprintf("gpu%d", gpuMinor), "mig", fmt.Sprintf("gi%d", instance))
}

// InstanceMinor returns the minor number of a GPU instance's capability device node.
func InstanceMinor(p nvidia.Paths, gpuMinor int, instance uint32) (int, error) {
	c, err := readCapability(filepath.Join(instanceFolder(p, gpuMinor, instance), "access"))
	return c.minor, err
}

// ComputeMinor returns the minor number of a compute instance's capability device node.
func ComputeMinor(p nvidia.Paths, gpuMinor int, instance, compute uint32) (int, error) {
	c, err := readCapability(filepath.Join(instanceFolder(p, gpuMinor, instance), fmt.Sprintf("ci%d", compute), "access"))
	return c.minor, err
}

// MonitorMinor returns the minor number of the capability to monitor all MIG instances.
func MonitorMinor(p nvidia.Paths) (int, error) {
	c, err := readCapability(filepath.Join(p.Proc, "driver", "nvidia", "capabilities", "mig", "monitor"))
	return c.minor, err
}

// capability is the content of a capability file.
type capability struct {
	minor int
	mode  fs.FileMode
}

func readCapability(path string) (capability, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return capability{}, fmt.Errorf("read the MIG capability: %w", err)
	}
	c := capability{minor: -1, mode: 0o444}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 31)
		if err != nil {
			continue
		}
		switch name {
		case "DeviceFileMinor":
			c.minor = int(n)
		case "DeviceFileMode": // in decimal
			c.mode = fs.FileMode(n) & fs.ModePerm
		}
	}
	if c.minor < 0 {
		return capability{}, fmt.Errorf("read the MIG capability: %s names no DeviceFileMinor", path)
	}
	return c, nil
}

// CapabilityNode returns a capability device node's path in a container. On the host, the same path
// is below the dev root.
func CapabilityNode(minor int) string { return fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor) }

// MakeCapabilityNodes creates the capability device nodes of a MIG device, or replaces those with
// an outdated major number. The driver gets another major number each time its module is loaded.
func MakeCapabilityNodes(p nvidia.Paths, gpuMinor int, instance, compute uint32) error {
	folder := instanceFolder(p, gpuMinor, instance)
	for _, file := range []string{filepath.Join(folder, "access"), filepath.Join(folder, fmt.Sprintf("ci%d", compute), "access")} {
		c, err := readCapability(file)
		if err != nil {
			return err
		}
		if err := makeCapabilityNode(p, c); err != nil {
			return fmt.Errorf("make the device node of %s: %w", file, err)
		}
	}
	return nil
}

// makeCapabilityNode creates the device node of c below the dev root, next to the driver's other
// device nodes. If the dev root is mounted read-only, as in some driver containers, it creates the
// device node in the host's /dev.
func makeCapabilityNode(p nvidia.Paths, c capability) error {
	major, err := CapabilityMajor(p)
	if err != nil {
		return err
	}
	root := p.DeviceRoot()
	err = c.make(root, major)
	if errors.Is(err, unix.EROFS) && root != "/" {
		err = c.make("/", major)
	}
	return err
}

func (c capability) make(root string, major uint32) error {
	path := filepath.Join(root, CapabilityNode(c.minor))
	number := unix.Mkdev(major, uint32(c.minor)) //nolint:gosec // 31 bits
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeCharDevice != 0 && hostfile.DeviceNumber(info) == number {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// Create the device node under a temporary name and rename it, so that a reader finds the old
	// or the new device node.
	fresh := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := unix.Mknod(fresh, unix.S_IFCHR|uint32(c.mode), int(number)); err != nil { //nolint:gosec // a device number
		return &fs.PathError{Op: "mknod", Path: fresh, Err: err}
	}
	// The umask removed permission bits, so set them again.
	err := errors.Join(os.Chmod(fresh, c.mode), os.Rename(fresh, path))
	if err != nil {
		_ = os.Remove(fresh)
	}
	return err
}

// CapabilityMajor returns the major number that all capability device nodes have.
func CapabilityMajor(p nvidia.Paths) (uint32, error) {
	majors, err := Majors(p)
	if err != nil {
		return 0, fmt.Errorf("find the major number of nvidia-caps: %w", err)
	}
	major, listed := majors["nvidia-caps"]
	if !listed {
		return 0, fmt.Errorf("find the major number of nvidia-caps: %s does not list it", filepath.Join(p.Proc, "devices"))
	}
	return major, nil
}

// Majors returns the major numbers of NVIDIA drivers by their names in the kernel's list of
// character devices, /proc/devices.
func Majors(p nvidia.Paths) (map[string]uint32, error) {
	data, err := os.ReadFile(filepath.Join(p.Proc, "devices"))
	if err != nil {
		return nil, err
	}
	characters, _, _ := strings.Cut(string(data), "Block devices:")
	majors := map[string]uint32{}
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 || !strings.HasPrefix(fields[1], "nvidia") {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 12); err == nil {
			majors[fields[1]] = uint32(n)
		}
	}
	return majors, nil
}
