package scan

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/persistenced"
)

// Foreign lists the processes that have GPUs or their DRM devices open. It leaves out processes
// that close a GPU when it is to be bound to VFIO: the child processes of this plugin and of
// another instance of it, and nvidia-persistenced if it can be asked.
func Foreign(p nvidia.Paths, gpus []device.GPU) map[device.PCIAddress][]nvidia.Process {
	found, asked := Users(p, gpus), persistenced.In(p.WithDefaults().DriverRoot).HasSocket()
	for gpu, users := range found {
		found[gpu] = slices.DeleteFunc(users, func(u nvidia.Process) bool {
			return u.Plugin || (asked && u.Name == persistenced.ProcessName)
		})
		if len(found[gpu]) == 0 {
			delete(found, gpu)
		}
	}
	return found
}

// Users lists the processes of the host, except this one, that have GPUs or their DRM devices open.
// It reads the open files of every process once.
func Users(p nvidia.Paths, gpus []device.GPU) map[device.PCIAddress][]nvidia.Process {
	p = p.WithDefaults()
	nodes, all := make([]host.DeviceNodes, len(gpus)), host.DeviceNodes{}
	for i, g := range gpus {
		nodes[i] = host.GPUNodes(p, g.PCIAddress, g.Minor)
	}
	found := map[device.PCIAddress][]nvidia.Process{}
	for _, process := range host.UsersOf(p, all.And(nodes...)) {
		for i, g := range gpus {
			if host.Uses(p, process.PID, nodes[i]) {
				found[g.PCIAddress] = append(found[g.PCIAddress], process)
			}
		}
	}
	return found
}
