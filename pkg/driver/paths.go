package driver

import (
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Paths is the part of the configuration that package nvidia looks at.
func Paths(cfg *config.Config) nvidia.Paths {
	return nvidia.Paths{
		DriverRoot:     cfg.DriverRootMount,
		HostDriverRoot: cfg.DriverRoot,
		DevRoot:        cfg.DevRoot,
		DriverDirs:     cfg.ExtraDriverDirs(),
		Sysfs:          cfg.SysfsRoot,
		Proc:           cfg.ProcRoot,
		Cgroups:        cfg.CgroupRoot,
		HookPath:       cfg.HookPath,
	}
}

// MPSPaths is the part of it that package mps looks at.
func MPSPaths(cfg *config.Config) mps.Paths {
	return mps.Paths{PluginDir: cfg.PluginDir, ShmRoot: cfg.ShmRoot}
}

// visible says where this process sees what the host knows by a path. What is the driver's own lies at the same path on both sides.
func (d *Driver) visible(paths nvidia.Paths) cdi.Mapper {
	own := []string{d.cfg.PluginDir, d.cfg.ShmRoot, filepath.Dir(d.cfg.HookPath)}
	return func(host string) string {
		for _, root := range own {
			if host == root || strings.HasPrefix(host, root+"/") {
				return host
			}
		}
		return paths.Visible(host)
	}
}
