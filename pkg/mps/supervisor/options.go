package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
)

// DefaultStartTimeout is far longer than a start, which takes milliseconds and touches no GPU. If a
// start hangs, the plugin still gets the error in time: to end the daemon takes at most another 8
// s, the plugin gives up after 20 s, and the kubelet after 45 s.
const DefaultStartTimeout = 8 * time.Second

// Options are the paths and settings of a supervisor.
type Options struct {
	Paths mps.Paths
	// DriverRoot is the root of the driver's files on the host. Messages name it. DriverRootMount is
	// the path of the same directory in the supervisor's container.
	DriverRoot, DriverRootMount string
	// DevRoot is the directory in the supervisor's container whose subdirectory dev holds the driver's
	// device nodes. The path of that subdirectory is accepted too. If it is empty,
	// [driverroot.DeviceRoot] finds it, as for the plugin.
	DevRoot string
	// SELinuxLabel is the label of the directories that containers mount. Empty sets no label.
	SELinuxLabel string
	// SharedMemory is the size of each daemon's /dev/shm, which its clients mount too, in MiB. 0 means
	// half of the node's memory.
	SharedMemory uint64
	// StartTimeout is how long a daemon may take to become ready.
	StartTimeout time.Duration
	// Program is the path of gpu-mps. The supervisor runs it to set up a daemon's mount namespace.
	Program string
}

func (o *Options) complete() error {
	if !filepath.IsAbs(o.Paths.PluginDir) {
		return fmt.Errorf("the plugin directory %q is not an absolute path", o.Paths.PluginDir)
	}
	if o.DriverRootMount == "" {
		o.DriverRootMount = o.DriverRoot
	}
	return nil
}

// dev returns the directory with the driver's device nodes, or "" if that is the host's /dev. It
// searches for them at each call, because a driver container may create its device nodes later.
func (o *Options) dev() string {
	root := strings.TrimSuffix(filepath.Clean("/"+o.DevRoot), "/dev")
	if o.DevRoot == "" {
		root = driverroot.DeviceRoot(o.DriverRootMount)
	}
	dev := filepath.Join("/", root, "dev")
	driversDev, err := os.Stat(dev)
	if own, ownErr := os.Stat("/dev"); err == nil && ownErr == nil && os.SameFile(driversDev, own) {
		return "" // a driver root at the host's /
	}
	return dev
}

// sharedMemory returns the size of each daemon's /dev/shm in the format of tmpfs(5).
func (o *Options) sharedMemory() string {
	if o.SharedMemory == 0 {
		return halfOfMemory
	}
	return mebibytes(o.SharedMemory)
}
