package main

import (
	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const forceUsage = "even while a process has NVML initialised. Its calls then return DRIVER_NOT_LOADED"

func newDriver(n *node) *cobra.Command {
	command := &cobra.Command{Use: "driver", Short: "Unload the driver, load it, or load another version"}
	command.AddCommand(newDriverAway(n), newDriverBack(n), newDriverReload(n))
	return command
}

func newDriverAway(n *node) *cobra.Command {
	var files, force bool
	command := &cobra.Command{
		Use:   "away",
		Short: "Unload the driver (exit code 3 while a process uses it)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.withLayout(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, files, force) })
		},
	}
	command.Flags().BoolVar(&files, "files", false, "also uninstall the driver: empty the driver root and remove the device nodes")
	command.Flags().BoolVar(&force, "force", false, forceUsage)
	return command
}

func newDriverBack(n *node) *cobra.Command {
	var version, cuda string
	command := &cobra.Command{
		Use:   "back",
		Short: "Load the driver, and install it first if it is missing",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.withLayout(func(c *layout.Config, f *state.File) error { return c.DriverBack(f, version, cuda) })
		},
	}
	versionFlags(command, &version, &cuda)
	return command
}

func newDriverReload(n *node) *cobra.Command {
	var version, cuda string
	var force bool
	command := &cobra.Command{
		Use:   "reload",
		Short: "Unload the driver and load it again (exit code 3 while a process uses it)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.withLayout(func(c *layout.Config, f *state.File) error { return c.DriverReload(f, version, cuda, force) })
		},
	}
	versionFlags(command, &version, &cuda)
	command.Flags().BoolVar(&force, "force", false, forceUsage)
	return command
}

func versionFlags(command *cobra.Command, version, cuda *string) {
	command.Flags().StringVar(version, "version", "", "driver version; by default unchanged")
	command.Flags().StringVar(cuda, "cuda-version", "", "CUDA version; by default unchanged")
}
