package scan

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// Foreign lists the processes that have GPUs open, by the minor number of the GPU. It leaves out
// the child processes of this plugin and of another instance of it.
func Foreign(p nvidia.Paths, minors []int) map[int][]nvidia.Process {
	found := Users(p, minors)
	for minor, users := range found {
		found[minor] = slices.DeleteFunc(users, func(u nvidia.Process) bool { return u.Plugin })
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
