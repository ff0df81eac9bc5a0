package scan

import (
	"os"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// CapabilityEdits returns the edits that a MIG device needs in addition to [nvidia.Node.Common]:
// the GPU's device node and the capability device nodes of the GPU instance and the compute
// instance. parent has the GPU's [nvidia.GPU.Edits]. Its DRM device nodes are dropped, because they
// give access to the whole GPU, or since driver 575.51 to one of its MIG devices with graphics. No
// file says to which, so a +gfx partition gets none either.
func CapabilityEdits(
	p nvidia.Paths, parent specs.ContainerEdits, instance device.Instance, compute device.ComputeInstance,
) specs.ContainerEdits {
	p = p.WithDefaults()
	e := withoutGraphics(parent)
	e.DeviceNodes = append(slices.Clone(e.DeviceNodes), capabilityNode(p, instance.Minor), capabilityNode(p, compute.Minor))
	return e
}

// MonitorEdits returns the capability device node with which a monitoring container sees all MIG
// instances. It has none if the driver has no MIG capabilities. The capability "config" is not
// given: with it a container could destroy the instances of others. Sources:
// https://github.com/NVIDIA/nvidia-container-toolkit/issues/1740, and the MIG guide on
// capabilities.
func MonitorEdits(p nvidia.Paths) specs.ContainerEdits {
	p = p.WithDefaults()
	minor, err := host.MonitorMinor(p)
	if err != nil {
		return specs.ContainerEdits{}
	}
	return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{capabilityNode(p, minor)}}
}

// capabilityMode is the mode that the driver asks for in the capability files of instances and of
// monitoring. A runtime would otherwise create a device node that it does not find on the host as
// writable for everyone.
const capabilityMode os.FileMode = 0o444

// capabilityNode describes a capability device node by its number, so that a container can have it
// where the host does not. The number is current: a driver reload changes it and removes all
// instances, and the plugin then writes the specs of the instances anew.
func capabilityNode(p nvidia.Paths, minor int) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: host.CapabilityNode(minor), Permissions: "rw"}
	if major, err := host.CapabilityMajor(p); err == nil {
		mode := capabilityMode
		n.Type, n.Major, n.Minor, n.FileMode = "c", int64(major), int64(minor), &mode
		return n
	}
	if hostPath := p.Host(capabilityPath(p, minor)); hostPath != n.Path {
		n.HostPath = hostPath
	}
	return n
}
