package scan

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// graphicsFolder has the DRM device nodes, in /dev of the host and of a container.
const graphicsFolder = "/dev/dri"

// graphicsEdits returns the GPU's DRM device nodes, which graphics programs open, and the links to
// them by PCI address. A GPU has them if the kernel module nvidia-drm is loaded. nvcdi would look
// for them only in this container's /sys and in the driver container's /dev.
func graphicsEdits(p nvidia.Paths, a device.PCIAddress) edits {
	var e edits
	arguments := []string{"nvidia-cdi-hook", "create-symlinks"}
	for _, name := range host.GraphicsDevices(p.Sysfs, a) {
		node := filepath.Join(p.DeviceRoot(), graphicsFolder, name)
		if !hostfile.IsCharDevice(node) {
			node = filepath.Join(graphicsFolder, name) // the kernel makes them in the host's /dev
		}
		if !hostfile.IsCharDevice(node) {
			continue
		}
		e.DeviceNodes = append(e.DeviceNodes, &specs.DeviceNode{Path: node})
		kind := "card"
		if strings.HasPrefix(name, "renderD") {
			kind = "render"
		}
		arguments = append(arguments, "--link", fmt.Sprintf("../%s::%s/by-path/pci-%s-%s", name, graphicsFolder, a, kind))
	}
	if len(e.DeviceNodes) > 0 {
		e.Hooks = []*specs.Hook{{HookName: "createContainer", Path: p.HookPath, Args: arguments}}
	}
	return e
}

// withoutGraphics returns e without the DRM device nodes and the hooks for them.
func withoutGraphics(e edits) edits {
	e.DeviceNodes = slices.DeleteFunc(slices.Clone(e.DeviceNodes), func(n *specs.DeviceNode) bool {
		return strings.Contains(n.Path, graphicsFolder+"/")
	})
	e.Hooks = slices.DeleteFunc(slices.Clone(e.Hooks), func(h *specs.Hook) bool {
		return slices.ContainsFunc(h.Args, func(arg string) bool { return strings.Contains(arg, graphicsFolder) })
	})
	return e
}
