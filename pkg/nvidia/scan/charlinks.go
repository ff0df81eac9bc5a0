package scan

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// LinkDeviceNodes links dir, the host's /dev/char, to the device nodes of n by their numbers. When
// systemd reloads its units, it applies the device rules of all containers again, and drops a rule
// without such a link. udev makes none, because NVIDIA's devices are not in sysfs. Source:
// https://github.com/NVIDIA/nvidia-container-toolkit/issues/48.
func LinkDeviceNodes(p nvidia.Paths, n nvidia.Node, dir string) error {
	p = p.WithDefaults()
	nodes := n.Common.DeviceNodes
	for _, g := range n.GPUs {
		nodes = append(nodes[:len(nodes):len(nodes)], g.Edits.DeviceNodes...)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { // a host without udev has none
		return fmt.Errorf("make the folder for links to device nodes: %w", err)
	}
	var errs []error
	visible := p.Mapper()
	for _, node := range nodes {
		hostPath := cmp.Or(node.HostPath, node.Path)
		errs = append(errs, linkDeviceNode(dir, visible(hostPath), hostPath))
	}
	minors := capabilityMinors(n)
	if monitor, err := host.MonitorMinor(p); err == nil { // containers with admin access have it
		minors = append(minors, monitor)
	}
	for _, minor := range minors {
		path := capabilityPath(p, minor)
		err := linkDeviceNode(dir, path, p.Host(path))
		if !errors.Is(err, fs.ErrNotExist) { // not every host has a device node for each instance
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// capabilityMinors returns the minor numbers of the capability device nodes of all MIG instances.
func capabilityMinors(n nvidia.Node) []int {
	var minors []int
	for _, g := range n.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, in := range g.MIG.Instances {
			minors = append(minors, in.Minor)
			for _, c := range in.Compute {
				minors = append(minors, c.Minor)
			}
		}
	}
	return minors
}

// capabilityPath returns where this process sees a capability device node. A driver container whose
// dev cannot be written has them in the host's /dev.
func capabilityPath(p nvidia.Paths, minor int) string {
	node := host.CapabilityNode(minor)
	path := filepath.Join(p.DeviceRoot(), node)
	if !hostfile.IsCharDevice(path) && hostfile.IsCharDevice(node) {
		return node
	}
	return path
}

// linkDeviceNode links dir to a device node that this process sees at path, and that is at hostPath
// on the host.
func linkDeviceNode(dir, path, hostPath string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("link the device node: %w", err)
	}
	number := hostfile.DeviceNumber(info)
	link := filepath.Join(dir, fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number)))
	// This process may see no file at the link's target, which is a path on the host.
	if target, err := os.Readlink(link); err == nil && target == hostPath {
		return nil
	}
	if there, err := os.Stat(link); err == nil && hostfile.DeviceNumber(there) == number {
		return nil
	}
	// What is there leads nowhere, for example to a driver container that is gone, or to a device that
	// has had another number since the driver's reload.
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the link to the device node %s: %w", hostPath, err)
	}
	if err := os.Symlink(hostPath, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link the device node: %w", err)
	}
	return nil
}
