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
// GPU.
func capabilityEdits(
	p nvidia.Paths, parent specs.ContainerEdits, instance device.Instance, compute device.ComputeInstance,
) specs.ContainerEdits {
	e := parent
	e.DeviceNodes = slices.DeleteFunc(slices.Clone(parent.DeviceNodes), func(n *specs.DeviceNode) bool {
		return strings.HasPrefix(n.Path, "/dev/dri/")
	})
	e.Hooks = slices.DeleteFunc(slices.Clone(parent.Hooks), func(h *specs.Hook) bool {
		return slices.ContainsFunc(h.Args, func(arg string) bool { return strings.Contains(arg, "/dev/dri") })
	})
	for _, minor := range []int{instance.Minor, compute.Minor} {
		n := &specs.DeviceNode{Path: host.CapabilityNode(minor), Permissions: "rw"}
		root := p.DeviceRoot()
		if !hostfile.IsCharDevice(filepath.Join(root, n.Path)) && hostfile.IsCharDevice(n.Path) {
			root = "/"
		}
		if host := p.Host(filepath.Join(root, n.Path)); host != n.Path {
			n.HostPath = host
		}
		e.DeviceNodes = append(e.DeviceNodes, n)
	}
	return e
}
