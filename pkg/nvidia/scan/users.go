package scan

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
)

// Users lists the processes of the host, except this one, that have the device node of a GPU open.
// NVML lists only processes with a CUDA or graphics context.
func Users(p nvidia.Paths, minor int) []nvidia.Process {
	return host.UsersOf(p.WithDefaults(), host.GPUNode(minor))
}
