package device

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// voltaCapability is where MPS gives each client an address space of its own, and limits of memory and threads.
	voltaCapability = 7
	// manyUsersDriver is the NVIDIA driver from which on a daemon of MPS serves several users at once, as those of a fraction are.
	manyUsersDriver = 555
)

// WhyNoFractions says why nothing could keep processes to fractions of a GPU, for people to read. It is empty if MPS can: what is not known is not promised.
func WhyNoFractions(g GPU, d Driver) string {
	if g.MemoryBytes == 0 {
		return "fractions are parts of a GPU's memory, and NVML does not say how much this one has"
	}
	switch n, err := major(g.CUDAComputeCapability); {
	case err != nil:
		return fmt.Sprintf("whether MPS can limit memory is not known: its CUDA compute capability %q is none", g.CUDAComputeCapability)
	case n < voltaCapability:
		return fmt.Sprintf("MPS cannot limit memory on GPUs before Volta, and this one has CUDA compute capability %s", g.CUDAComputeCapability)
	}
	switch n, err := major(d.Version); {
	case err != nil:
		return fmt.Sprintf("whether MPS serves several users is not known: the NVIDIA driver's version %q is none", d.Version)
	case n < manyUsersDriver:
		return fmt.Sprintf("MPS serves several users at once from NVIDIA driver %d on, and this node has %s", manyUsersDriver, d.Version)
	}
	return ""
}

// ContainerLimits says whether a container that has a fraction of the device is held to it as a whole, and not each of its processes alone: NVIDIA's driver
// counts no container's memory on MIG devices.
func ContainerLimits(g GPU, n Name) bool {
	return g.ContainerLimits && n.Partition == nil && (g.MIG == nil || !g.MIG.Enabled)
}

// major is the first number of a version.
func major(version string) (uint64, error) {
	first, _, _ := strings.Cut(version, ".")
	return strconv.ParseUint(first, 10, 16)
}
