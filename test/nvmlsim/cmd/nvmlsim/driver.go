package main

import (
	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const forceUsage = "even while a process has NVML initialised; it is then told that the driver is not loaded"

func newDriver(n *node) *cobra.Command {
	command := &cobra.Command{Use: "driver", Short: "Take the driver away, bring it back, load another version"}
	command.AddCommand(newDriverAway(n), newDriverBack(n), newDriverReload(n))
	return command
}

func newDriverAway(n *node) *cobra.Command {
	var files, force bool
	command := &cobra.Command{
		Use:   "away",
		Short: "Unload the driver (exit code 3 while a process holds it)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.withLayout(func(c *layout.Config, f *state.File) error { return c.DriverAway(f, files, force) })
		},
	}
	command.Flags().BoolVar(&files, "files", false, "uninstall it too: empty the driver root and remove the device nodes")
	command.Flags().BoolVar(&force, "force", false, forceUsage)
	return command
}

func newDriverBack(n *node) *cobra.Command {
	var version, cuda string
	command := &cobra.Command{
		Use:   "back",
		Short: "Load the driver, installing it first where it is not",
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
		Short: "Unload the driver and load it again (exit code 3 while a process holds it)",
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
	command.Flags().StringVar(version, "version", "", "driver version; without it the same as before")
	command.Flags().StringVar(cuda, "cuda-version", "", "CUDA version; without it the same as before")
}
