package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// LinkDeviceNodes links the host's /dev/char to the device nodes of n by their numbers. When
// systemd reloads its units, it applies the device rules of all containers again, and drops a rule
// without such a link. udev makes none, because NVIDIA's devices are not in sysfs. Source:
// https://github.com/NVIDIA/nvidia-container-toolkit/issues/48.
func (p Paths) LinkDeviceNodes(n Node) error {
	if p.CharDir == "" {
		return nil
	}
	nodes := n.Common.DeviceNodes
	for _, g := range n.GPUs {
		nodes = append(nodes[:len(nodes):len(nodes)], g.Edits.DeviceNodes...)
	}
	var errs []error
	visible := p.Mapper()
	for _, node := range nodes {
		host := node.HostPath
		if host == "" {
			host = node.Path
		}
		errs = append(errs, p.LinkDeviceNode(visible(host), host))
	}
	return errors.Join(errs...)
}

// LinkDeviceNode does the same for one device node, which this process sees at path and which is at
// hostPath on the host.
func (p Paths) LinkDeviceNode(path, hostPath string) error {
	if p.CharDir == "" {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("link the device node: %w", err)
	}
	number := hostfile.DeviceNumber(info)
	link := filepath.Join(p.CharDir, fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number)))
	// This process may see no file at the link's target, which is a path on the host.
	if target, err := os.Readlink(link); err == nil && target == hostPath || hostfile.Exists(link) {
		return nil
	}
	// What is there leads nowhere, for example to a driver container that is gone.
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the link to the device node %s: %w", hostPath, err)
	}
	if err := os.Symlink(hostPath, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link the device node: %w", err)
	}
	return nil
}
