package scan

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// Users lists the processes of the host, except this one, that have the device node of a GPU open.
// NVML lists only processes with a CUDA or graphics context.
func Users(p nvidia.Paths, minor int) []nvidia.Process {
	return host.UsersOf(p.WithDefaults(), host.GPUNodes(minor))
}

// Foreign lists the processes that have GPUs open, by the minor number of the GPU. It leaves out
// the child processes of this plugin and of another instance of it, and nvidia-persistenced. It
// reads the open files of every process of the host once.
func Foreign(p nvidia.Paths, minors []int) map[int][]nvidia.Process {
	p = p.WithDefaults()
	found := map[int][]nvidia.Process{}
	for _, process := range host.Foreign(host.UsersOf(p, host.GPUNodes(minors...))) {
		for _, minor := range minors {
			if host.Uses(p, process.PID, host.GPUNodes(minor)) {
				found[minor] = append(found[minor], process)
			}
		}
	}
	return found
}
