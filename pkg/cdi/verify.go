package cdi

import (
	"cmp"
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Mapper converts a host path to the path at which this process sees the file.
type Mapper func(host string) string

// Verify checks that the files in edits exist, so that a container with these edits can start:
// device nodes without a number, mount sources and hooks. Hooks must be
// writable by root only. The error names the first file that is missing or wrong.
func (visible Mapper) Verify(edits specs.ContainerEdits) error {
	for _, n := range edits.DeviceNodes {
		if n.Major != 0 {
			continue // the runtime creates the device node by its number and needs none on the host
		}
		host := cmp.Or(n.HostPath, n.Path)
		info, err := os.Stat(visible(host))
		if err != nil {
			return fmt.Errorf("device node %s is missing on the node (%w): run nvidia-smi or nvidia-modprobe on the node to create it", host, err)
		}
		if info.Mode()&os.ModeCharDevice == 0 {
			return fmt.Errorf("%s on the node is not a character device: remove it and run nvidia-modprobe", host)
		}
	}
	for _, m := range edits.Mounts {
		if _, err := os.Stat(visible(m.HostPath)); err != nil {
			return fmt.Errorf("mount source %s is missing on the node (%w): "+
				"a driver installation that has just changed is picked up within seconds, otherwise reinstall the driver", m.HostPath, err)
		}
	}
	seen := map[string]bool{} // one program runs as several hooks
	for _, h := range edits.Hooks {
		if seen[h.Path] {
			continue
		}
		seen[h.Path] = true
		info, err := os.Stat(visible(h.Path))
		if err != nil {
			return fmt.Errorf("hook %s is missing on the node (%w): restart the plugin, which installs it", h.Path, err)
		}
		if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return fmt.Errorf("hook %s on the node is not an executable file", h.Path)
		}
		if err := durable.CheckFile(visible(h.Path)); err != nil {
			return fmt.Errorf("hook %s on the node: %w", h.Path, err)
		}
	}
	return nil
}
