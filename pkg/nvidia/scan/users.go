package scan

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/persistenced"
)

// Foreign lists the processes that have GPUs open, by the minor number of the GPU. It leaves out
// processes that close a GPU when it is to be bound to VFIO: the child processes of this plugin and
// of another instance of it, and nvidia-persistenced if it can be asked.
func Foreign(p nvidia.Paths, minors []int) map[int][]nvidia.Process {
	found, asked := Users(p, minors), persistenced.In(p.WithDefaults().DriverRoot).HasSocket()
	for minor, users := range found {
		found[minor] = slices.DeleteFunc(users, func(u nvidia.Process) bool {
			return u.Plugin || (asked && u.Name == persistenced.ProcessName)
		})
		if len(found[minor]) == 0 {
			delete(found, minor)
		}
	}
	return found
}

// Users lists the processes of the host, except this one, that have GPUs open, by the minor number
// of the GPU. It reads the open files of every process once.
func Users(p nvidia.Paths, minors []int) map[int][]nvidia.Process {
	p = p.WithDefaults()
	found := map[int][]nvidia.Process{}
	for _, process := range host.UsersOf(p, host.GPUNodes(minors...)) {
		for _, minor := range minors {
			if host.Uses(p, process.PID, host.GPUNodes(minor)) {
				found[minor] = append(found[minor], process)
			}
		}
	}
	return found
}
