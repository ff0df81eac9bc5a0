package vfio

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Access has the host's device nodes with which a process uses a GPU that is bound to VFIO.
type Access struct {
	// Node is the node of the GPU's IOMMU group, such as /dev/vfio/17, or with iommufd that of the GPU
	// itself, such as /dev/vfio/devices/vfio3. The latter has another number after each bind.
	Node string `json:"node"`
	// API is the node with which a process begins to use VFIO or iommufd. All GPUs share it.
	API string `json:"api"`
}

const (
	// nodePoll is how often AwaitAccess looks for a device node, and nodeLimit how long. The kernel
	// and udev create nodes within milliseconds.
	nodePoll  = 20 * time.Millisecond
	nodeLimit = 10 * time.Second
)

// AwaitAccess returns the device nodes of a bound GPU as soon as they exist. With preferIOMMUFD
// these are those of iommufd, if the kernel has it. sysfs and dev are where the caller sees the
// host's /sys and /dev.
func AwaitAccess(ctx context.Context, sysfs, dev string, gpu device.PCIAddress, preferIOMMUFD bool) (a Access, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, nodeLimit, fmt.Errorf("not within %s", nodeLimit))
	defer cancel()
	waited := wait.PollUntilContextCancel(ctx, nodePoll, true, func(context.Context) (bool, error) {
		a, err = access(sysfs, dev, gpu, preferIOMMUFD)
		return err == nil, nil
	})
	if waited != nil {
		return a, fmt.Errorf("wait for the VFIO device nodes of %s: %w (%w)", gpu, err, context.Cause(ctx))
	}
	return a, nil
}

func access(sysfs, dev string, gpu device.PCIAddress, preferIOMMUFD bool) (Access, error) {
	dir := filepath.Join(sysfs, "bus/pci/devices", string(gpu))
	exists := func(host string) error {
		_, err := os.Stat(filepath.Join(dev, host[len("/dev"):]))
		return err
	}
	if own, err := filepath.Glob(filepath.Join(dir, "vfio-dev", "vfio*")); preferIOMMUFD && err == nil && len(own) == 1 {
		a := Access{Node: filepath.Join("/dev/vfio/devices", filepath.Base(own[0])), API: "/dev/iommu"}
		if exists(a.API) == nil {
			return a, exists(a.Node)
		}
	}
	group, err := filepath.EvalSymlinks(filepath.Join(dir, "iommu_group"))
	if err != nil {
		return Access{}, err
	}
	a := Access{Node: filepath.Join("/dev/vfio", filepath.Base(group)), API: "/dev/vfio/vfio"}
	return a, exists(a.Node)
}

// NodesOf returns the paths of the device nodes of a GPU that is bound to VFIO, as the caller sees
// them.
func NodesOf(sysfs, dev string, gpu device.PCIAddress) (paths []string) {
	dir := filepath.Join(sysfs, "bus/pci/devices", string(gpu))
	if group, err := filepath.EvalSymlinks(filepath.Join(dir, "iommu_group")); err == nil {
		paths = append(paths, filepath.Join(dev, "vfio", filepath.Base(group)))
	}
	own, _ := filepath.Glob(filepath.Join(dir, "vfio-dev", "vfio*"))
	for _, o := range own {
		paths = append(paths, filepath.Join(dev, "vfio/devices", filepath.Base(o)))
	}
	return paths
}
