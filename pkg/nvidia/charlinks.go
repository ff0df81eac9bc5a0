package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// LinkDeviceNodes links dir, the host's /dev/char, to the device nodes of n by their numbers. When
// systemd reloads its units, it applies the device rules of all containers again, and drops a rule
// without such a link. udev makes none, because NVIDIA's devices are not in sysfs. Source:
// https://github.com/NVIDIA/nvidia-container-toolkit/issues/48.
func LinkDeviceNodes(p Paths, n Node, dir string) error {
	if dir == "" {
		return nil
	}
	nodes := n.Common.DeviceNodes
	for _, g := range n.GPUs {
		nodes = append(nodes[:len(nodes):len(nodes)], g.Edits.DeviceNodes...)
	}
	var errs []error
	visible := p.Mapper()
	for _, node := range nodes {
		errs = append(errs, linkDeviceNode(visible, node, dir))
	}
	return errors.Join(errs...)
}

func linkDeviceNode(visible func(host string) string, n *specs.DeviceNode, dir string) error {
	host := n.HostPath
	if host == "" {
		host = n.Path
	}
	info, err := os.Stat(visible(host))
	if err != nil {
		return fmt.Errorf("link the device node: %w", err)
	}
	number := hostfile.DeviceNumber(info)
	link := filepath.Join(dir, fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number)))
	if _, err := os.Stat(link); err == nil {
		return nil
	}
	// What is there leads nowhere, for example to a driver container that is gone.
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the link to the device node %s: %w", host, err)
	}
	if err := os.Symlink(host, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link the device node: %w", err)
	}
	return nil
}
