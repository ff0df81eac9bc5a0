package nvidia

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
)

// memoryLimitsFunction came with the accounting of device memory by control group, in drivers of r615 (CUDA 13.4).
const memoryLimitsFunction = "nvmlDeviceGetMemoryLimits_v1"

// containerLimits says whether the driver counts the card's memory by control group on this node. That is proven by its telling what this process's own
// group is limited to: a driver that is older lacks the function, and one that cannot count here says so. What is not proven is not promised. The driver's
// nvidia-smi must be there too, because it sets the limits.
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

// ownGroup is the directory of this process's control group. It is empty where root is not cgroup v2.
func ownGroup(proc, root string) string {
	var mount unix.Statfs_t
	if root == "" || unix.Statfs(root, &mount) != nil || mount.Type != unix.CGROUP2_SUPER_MAGIC {
		return ""
	}
	group, err := groupBelow(proc, root)
	if err != nil {
		return ""
	}
	return group
}

func groupBelow(proc, root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(proc, "self", "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if path, unified := strings.CutPrefix(strings.TrimSpace(line), "0::"); unified {
			return filepath.Join(root, filepath.Clean("/"+path)), nil
		}
	}
	return "", errors.New("no control group of cgroup v2")
}
