package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// scanCommand is the subcommand that the plugin starts itself as: NVML lives in that process, so that whatever it does to it stays there.
const scanCommand = "scan"

// runScan is the other end of scanHardware. It is not meant for people: inventory is.
func runScan(ctx context.Context, _ []string, out io.Writer) error {
	return nvidia.ServeScan(ctx, os.Stdin, out)
}

// scanHardware looks at the node's GPUs in a child process.
func scanHardware(cfg *config.Config) (func(context.Context) (nvidia.Node, error), error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the program to start for looking at the GPUs: %w", err)
	}
	return nvidia.Isolated(hardwarePaths(cfg), self, scanCommand), nil
}

// hardwarePaths says where the configured host's files are.
func hardwarePaths(cfg *config.Config) nvidia.Paths {
	return nvidia.Paths{
		DriverRoot:     cfg.DriverRootMount,
		HostDriverRoot: cfg.DriverRoot,
		DevRoot:        cfg.DevRoot,
		Sysfs:          cfg.SysfsRoot,
		Proc:           cfg.ProcRoot,
		HookPath:       cfg.HookPath,
	}
}
