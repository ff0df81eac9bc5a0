package scan

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// graphicsFolder has the DRM device nodes, in /dev of the host and of a container.
const graphicsFolder = "/dev/dri"

// drmNode is a DRM device node of a GPU, at path as this process sees it.
type drmNode struct {
	name, path string
	mode       os.FileMode
	gid        uint32
}

// drmNodes returns the DRM device nodes of a GPU. It has them if the kernel module nvidia-drm
// is loaded.
func drmNodes(p nvidia.Paths, a device.PCIAddress) (nodes []drmNode) {
	for _, name := range host.GraphicsDevices(p.Sysfs, a) {
		// The kernel makes them in the host's /dev.
		for _, dev := range []string{filepath.Join(p.DeviceRoot(), graphicsFolder), graphicsFolder} {
			n := drmNode{name: name, path: filepath.Join(dev, name)}
			info, err := os.Lstat(n.path)
			if err != nil || info.Mode()&os.ModeCharDevice == 0 {
				continue
			}
			n.mode = info.Mode().Perm()
			if s, ok := info.Sys().(*syscall.Stat_t); ok {
				n.gid = s.Gid
			}
			nodes = append(nodes, n)
			break
		}
	}
	return nodes
}

// forEveryone are the permissions with which any user can use a device node.
const forEveryone os.FileMode = 0o006

// graphicsEdits returns the GPU's DRM device nodes, which graphics programs open, and the links to
// them by PCI address. nvcdi would look for them only in this container's /sys and in the driver
// container's /dev. As nvcdi does, it gives the nodes their group on the host, and that group to
// the container's processes. Otherwise a program that drops root could not open them.
func graphicsEdits(p nvidia.Paths, a device.PCIAddress) edits {
	var e edits
	arguments := []string{"nvidia-cdi-hook", "create-symlinks"}
	for _, n := range drmNodes(p, a) {
		node := &specs.DeviceNode{Path: n.path}
		if n.gid != 0 {
			node.GID = new(n.gid)
			if n.mode&forEveryone != forEveryone && !slices.Contains(e.AdditionalGIDs, n.gid) {
				e.AdditionalGIDs = append(e.AdditionalGIDs, n.gid)
			}
		}
		e.DeviceNodes = append(e.DeviceNodes, node)
		kind := "card"
		if strings.HasPrefix(n.name, "renderD") {
			kind = "render"
		}
		arguments = append(arguments, "--link", fmt.Sprintf("../%s::%s/by-path/pci-%s-%s", n.name, graphicsFolder, a, kind))
	}
	if len(e.DeviceNodes) > 0 {
		e.Hooks = []*specs.Hook{{HookName: "createContainer", Path: p.HookPath, Args: arguments}}
	}
	return e
}

// withoutGraphics returns e without the DRM device nodes, their groups and the hooks for them.
func withoutGraphics(e edits) edits {
	isGraphics := func(n *specs.DeviceNode) bool { return strings.Contains(n.Path, graphicsFolder+"/") }
	e.AdditionalGIDs = slices.DeleteFunc(slices.Clone(e.AdditionalGIDs), func(gid uint32) bool {
		return !slices.ContainsFunc(e.DeviceNodes, func(n *specs.DeviceNode) bool { return !isGraphics(n) && n.GID != nil && *n.GID == gid })
	})
	e.DeviceNodes = slices.DeleteFunc(slices.Clone(e.DeviceNodes), isGraphics)
	e.Hooks = slices.DeleteFunc(slices.Clone(e.Hooks), func(h *specs.Hook) bool {
		return slices.ContainsFunc(h.Args, func(arg string) bool { return strings.Contains(arg, graphicsFolder) })
	})
	return e
}
