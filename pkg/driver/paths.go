package driver

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Paths returns the configured paths that package nvidia needs.
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
		LdconfigPath:   cfg.LdconfigPath,
		State:          cfg.StateDir(),
		Passthrough:    cfg.Settings.Passes(),
	}
}

// MPSPaths returns the configured paths that package mps needs.
func MPSPaths(cfg *config.Config) mps.Paths {
	return mps.Paths{PluginDir: cfg.PluginDir}
}

// visiblePath returns a function that converts the path of a file on the host to its path in the
// plugin's container. The plugin's own directories have the same path in both.
func visiblePath(cfg *config.Config) cdi.Mapper {
	return Paths(cfg).Mapper(append([]string{cfg.PluginDir}, cfg.HookDirs...)...)
}
