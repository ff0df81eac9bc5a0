package scan

import (
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// CapabilityEdits returns a function for the edits that a MIG device needs in addition to
// [nvidia.Node.Common]: the GPU's device node and the capability device nodes of the GPU instance
// and the compute instance. parent has the GPU's [nvidia.GPU.Edits].
func CapabilityEdits(
	p nvidia.Paths,
) func(parent specs.ContainerEdits, instance device.Instance, compute device.ComputeInstance) specs.ContainerEdits {
	p = p.WithDefaults()
	return func(parent specs.ContainerEdits, instance device.Instance, compute device.ComputeInstance) specs.ContainerEdits {
		return capabilityEdits(p, parent, instance, compute)
	}
}

// capabilityEdits drops the graphics device nodes of parent, because they give access to the whole
// GPU, except for a +gfx profile, which cannot do graphics without them.
func capabilityEdits(
	p nvidia.Paths, parent specs.ContainerEdits, instance device.Instance, compute device.ComputeInstance,
) specs.ContainerEdits {
	e := parent
	if !strings.HasSuffix(compute.Name, "+gfx") {
		e.DeviceNodes = slices.DeleteFunc(slices.Clone(parent.DeviceNodes), func(n *specs.DeviceNode) bool {
			return strings.HasPrefix(n.Path, "/dev/dri/")
		})
		e.Hooks = slices.DeleteFunc(slices.Clone(parent.Hooks), func(h *specs.Hook) bool {
			return slices.ContainsFunc(h.Args, func(arg string) bool { return strings.Contains(arg, "/dev/dri") })
		})
	}
	e.DeviceNodes = append(slices.Clone(e.DeviceNodes), capabilityNode(p, instance.Minor), capabilityNode(p, compute.Minor))
	return e
}

// MonitorEdits returns the capability device nodes with which a monitoring container sees all MIG
// instances: config and monitor. There are none if the driver has no MIG capabilities.
// Source: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1740.
func MonitorEdits(p nvidia.Paths) specs.ContainerEdits {
	p = p.WithDefaults()
	var e specs.ContainerEdits
	for _, name := range []string{"config", "monitor"} {
		if minor, err := host.SystemMinor(p, name); err == nil {
			e.DeviceNodes = append(e.DeviceNodes, capabilityNode(p, minor))
		}
	}
	return e
}

// capabilityNode describes a capability device node by its number, so that a container can have it
// where the host does not. The number is current: a driver reload changes it and removes all
// instances, and the plugin then writes the specs of the instances anew.
func capabilityNode(p nvidia.Paths, minor int) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: host.CapabilityNode(minor), Permissions: "rw"}
	if major, err := host.CapabilityMajor(p); err == nil {
		n.Type, n.Major, n.Minor = "c", int64(major), int64(minor)
		return n
	}
	root := p.DeviceRoot()
	if !hostfile.IsCharDevice(filepath.Join(root, n.Path)) && hostfile.IsCharDevice(n.Path) {
		root = "/"
	}
	if host := p.Host(filepath.Join(root, n.Path)); host != n.Path {
		n.HostPath = host
	}
	return n
}
