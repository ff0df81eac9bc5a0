package scan

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// Foreign lists the processes of the host that have GPUs open, by the minor number of the GPU. It
// leaves out this process, the child processes of this plugin and of another instance of it, and
// nvidia-persistenced. It reads the open files of every process once.
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
