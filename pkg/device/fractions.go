package device

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// voltaComputeCapability is the first CUDA compute capability with which each MPS client has its
	// own address space, and limits for memory and threads.
	voltaComputeCapability = 7
	// multiUserDriver is the first version of NVIDIA's driver whose MPS daemon serves processes of
	// several users at once, as MPS claims on one GPU need.
	multiUserDriver = 555
)

// FractionsUnsupportedReason explains why MPS cannot limit the memory and compute units of several
// claims on the GPU g. It returns "" if MPS can, and also a reason if it cannot tell.
func FractionsUnsupportedReason(g GPU, d Driver) string {
	if g.MemoryBytes == 0 {
		return "NVML does not report how much memory this GPU has"
	}
	switch n, err := major(g.CUDAComputeCapability); {
	case err != nil:
		return fmt.Sprintf("cannot determine whether MPS limits memory: CUDA compute capability %q is invalid", g.CUDAComputeCapability)
	case n < voltaComputeCapability:
		return fmt.Sprintf("MPS cannot limit memory on GPUs before Volta, and this one has CUDA compute capability %s",
			g.CUDAComputeCapability)
	}
	switch n, err := major(d.Version); {
	case err != nil:
		return fmt.Sprintf("cannot determine whether MPS serves several users: NVIDIA driver version %q is invalid", d.Version)
	case n < multiUserDriver:
		return fmt.Sprintf("MPS serves several users at once only from NVIDIA driver %d on, and this node has %s", multiUserDriver, d.Version)
	}
	return ""
}

// ContainerLimits reports whether a memory limit on the device n of the GPU g applies to a whole
// container. If not, it applies to each process. On a GPU in MIG mode it is always false, because
// NVIDIA's driver does not count a container's memory there.
func ContainerLimits(g GPU, n Name) bool {
	return g.ContainerLimits && n.Partition == nil && (g.MIG == nil || !g.MIG.Enabled)
}

// major returns the first number of a version such as "580.65.06".
func major(version string) (uint64, error) {
	first, _, _ := strings.Cut(version, ".")
	return strconv.ParseUint(first, 10, 16)
}
