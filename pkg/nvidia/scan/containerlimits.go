package scan

import (
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/hostfile"
)

// memoryLimitsFunction exists in drivers from r615 (CUDA 13.4). These drivers account device memory
// by cgroup.
const memoryLimitsFunction = "nvmlDeviceGetMemoryLimits_v1"

// containerLimits reports whether the driver can limit the card's memory by cgroup on this node:
// NVML returns the limit of this process's cgroup, which older drivers cannot, and the driver has
// nvidia-smi, which sets the limits.
func (s scanner) containerLimits(card nvml.Device) bool {
	if s.group == "" || s.lib.Extensions().LookupSymbol(memoryLimitsFunction) != nil {
		return false
	}
	if _, err := s.paths.Program("nvidia-smi"); err != nil {
		return false
	}
	_, ret := card.GetMemoryLimits_v1(s.group)
	return ret == nvml.SUCCESS
}

// ownGroup returns the directory of this process's cgroup. It is empty if root is not a cgroup v2
// mount.
func ownGroup(proc, root string) string {
	var mount unix.Statfs_t
	if root == "" || unix.Statfs(root, &mount) != nil || mount.Type != unix.CGROUP2_SUPER_MAGIC {
		return ""
	}
	return groupBelow(proc, root)
}

func groupBelow(proc, root string) string {
	groups := hostfile.ReadTrimmed(filepath.Join(proc, "self", "cgroup"))
	for line := range strings.Lines(groups) {
		if path, unified := strings.CutPrefix(strings.TrimSpace(line), "0::"); unified {
			return filepath.Join(root, filepath.Clean("/"+path))
		}
	}
	return ""
}
