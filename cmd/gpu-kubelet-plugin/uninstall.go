package main

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
)

// runUninstall is the command that the chart's pre-delete hook runs. It deletes the plugin's
// DaemonSet. Without --force, it refuses to do so while claims hold devices.
func runUninstall(ctx context.Context, args []string, _ io.Writer) error {
	var force bool
	var timeout time.Duration
	cfg, err := config.Load("gpu-kubelet-plugin uninstall", args, os.LookupEnv, func(flags *pflag.FlagSet) {
		flags.BoolVar(&force, "force", false, "continue although claims hold devices; files that their Pods need stay on the nodes")
		flags.DurationVar(&timeout, "timeout", 5*time.Minute, "how long to wait for the plugin's Pods to finish")
	})
	if err != nil {
		return asUsage(err)
	}
	if cfg.Namespace == "" || cfg.DaemonSetName == "" {
		return usageError{errors.New("--namespace and --daemonset-name: both are required to find the DaemonSet to remove")}
	}
	if err := startLogging(cfg); err != nil {
		return err
	}
	client, err := newClient(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return uninstall.Run(ctx, client, cfg.Namespace, cfg.DaemonSetName, force)
}
