package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// DefaultStartTimeout is far beyond the milliseconds that a start takes, which touches no GPU. The caller of one that hangs gets its error, with the time to
// end the daemon added (8 s, and some more if it cannot be ended), before it gives up by itself (20 s), and that in time to answer the kubelet, which waits 45 s.
const DefaultStartTimeout = 8 * time.Second

// Options say where things are.
type Options struct {
	// Paths are the host's.
	Paths mps.Paths
	// ShmRootMount is where this process sees Paths.ShmRoot. Empty means the same path.
	ShmRootMount string
	// DriverRoot is the root of the driver's files as the host sees it, for messages, and DriverRootMount as this process does.
	DriverRoot, DriverRootMount string
	// DevRoot is the directory, as this process sees it, whose dev holds the driver's device nodes (that dev itself is accepted too). Empty means: / if
	// its dev holds nvidiactl, else the driver root.
	DevRoot string
	// SELinuxLabel is given to the directories that are shared with containers. Empty: none.
	SELinuxLabel string
	// SharedMemory is what each daemon and its clients have for /dev/shm, in MiB. 0 means half of
	// the node's memory.
	SharedMemory uint64
	// StartTimeout is how long a daemon may take until it is ready. 0 means DefaultStartTimeout.
	StartTimeout time.Duration
	// Program is gpu-mps itself, which makes the mount namespace of daemons.
	Program string
}

func (o *Options) complete() error {
	if !filepath.IsAbs(o.Paths.PluginDir) {
		return fmt.Errorf("the plugin directory %q is not an absolute path", o.Paths.PluginDir)
	}
	if o.Program == "" {
		return errors.New("the path of gpu-mps itself is not known")
	}
	if o.ShmRootMount == "" {
		o.ShmRootMount = filepath.Dir(o.Paths.ShmDir())
	}
	if o.DriverRoot == "" {
		o.DriverRoot = "/"
	}
	if o.DriverRootMount == "" {
		o.DriverRootMount = o.DriverRoot
	}
	if o.StartTimeout == 0 {
		o.StartTimeout = DefaultStartTimeout
	}
	return nil
}

// dev is the directory with the driver's device nodes, or empty if that is /dev. It is looked up each time: a driver container brings its dev late.
func (o *Options) dev() string {
	root := strings.TrimSuffix(filepath.Clean("/"+o.DevRoot), "/dev")
	if o.DevRoot == "" {
		root = o.DriverRootMount
		if hasNodes("/") || !hasNodes(root) {
			return ""
		}
	}
	if root == "" || root == "/" {
		return ""
	}
	return filepath.Join(root, "dev")
}

func hasNodes(root string) bool {
	_, err := os.Lstat(filepath.Join(root, "dev", "nvidiactl"))
	return err == nil
}

// sharedMemory is the size of the file system.
func (o *Options) sharedMemory() string {
	if o.SharedMemory == 0 {
		return halfOfMemory
	}
	return mebibytes(o.SharedMemory)
}

// visible are the paths as this process sees them: the plugin's directory has the same name everywhere.
func (o *Options) visible() mps.Paths {
	return mps.Paths{PluginDir: o.Paths.PluginDir, ShmRoot: o.ShmRootMount}
}
