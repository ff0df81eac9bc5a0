package driver

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Paths is the part of the configuration that package nvidia looks at.
func Paths(cfg *config.Config) nvidia.Paths {
	return nvidia.Paths{
		DriverRoot:     cfg.DriverRootMount,
		HostDriverRoot: cfg.DriverRoot,
		DevRoot:        cfg.DevRoot,
		Sysfs:          cfg.SysfsRoot,
		Proc:           cfg.ProcRoot,
		HookPath:       cfg.HookPath,
	}
}
