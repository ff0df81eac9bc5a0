package supervisor

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// DefaultStartTimeout leaves the caller of a start that hangs time to answer the kubelet, which waits 45 s.
const DefaultStartTimeout = 30 * time.Second

// Options say where things are.
type Options struct {
	// Paths are the host's.
	Paths mps.Paths
	// ShmRootMount is where this process sees Paths.ShmRoot. Empty means the same path.
	ShmRootMount string
	// DriverRoot is the root of the driver's files as the host sees it, for messages, and DriverRootMount as this process does.
	DriverRoot, DriverRootMount string
	// SELinuxLabel is given to the directories that are shared with containers. Empty: none.
	SELinuxLabel string
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

// visible are the paths as this process sees them: the plugin's directory has the same name everywhere.
func (o *Options) visible() mps.Paths {
	return mps.Paths{PluginDir: o.Paths.PluginDir, ShmRoot: o.ShmRootMount}
}
