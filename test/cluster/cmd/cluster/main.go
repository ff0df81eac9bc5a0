// Command cluster builds, starts, breaks, repairs and removes a real Kubernetes cluster on this
// machine. It is a thin shell around package cluster, which documents the cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

func main() {
	// A first Ctrl-C cancels the current work, which then removes what it had started. A second Ctrl-C
	// changes nothing, because that removal has a time limit.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		var ran commandError
		if errors.As(err, &ran) {
			os.Exit(ran.ExitCode())
		}
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

// commandError carries the exit code of a command that the user asked for, such as kubectl. Its
// error is not printed again, because the command has printed it.
type commandError struct {
	*exec.ExitError
}

// passOn returns a commandError if the user's command exited with a non-zero code. Any other error
// is returned unchanged.
func passOn(err error) error {
	var failed *exec.ExitError
	if errors.As(err, &failed) && failed.ExitCode() > 0 {
		return commandError{failed}
	}
	return err
}

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "cluster",
		Short:         "A real Kubernetes cluster on this machine, for tests and demonstrations",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	name := root.PersistentFlags().String("name", cluster.DefaultName, "the cluster's name; clusters with different names can run at once")
	root.AddCommand(buildCommand(), buildImageCommand(), upCommand(name), downCommand(name), statusCommand(name))
	root.AddCommand(nodeCommands(name)...)
	root.AddCommand(clientCommands(name)...)
	return root
}

func buildCommand() *cobra.Command {
	var options cluster.Options
	command := &cobra.Command{
		Use:   "build",
		Short: "Build everything a cluster needs that is not in the cache yet",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			_, err := cluster.Build(command.Context(), options, command.ErrOrStderr())
			return err
		},
	}
	addVersionFlags(command, &options)
	return command
}

// addVersionFlags adds the flags that select other versions than the pinned ones.
func addVersionFlags(command *cobra.Command, options *cluster.Options) {
	command.Flags().StringVar(&options.Kubernetes, "kubernetes", "", "`version` of Kubernetes, like 1.37, instead of the pinned one")
	command.Flags().StringVar(&options.Containerd, "containerd", "", "`version` of containerd, like 1.7, instead of the pinned one")
}

func buildImageCommand() *cobra.Command {
	var build cluster.ImageBuild
	command := &cobra.Command{
		Use:   "build-image",
		Short: "Build an image from a Dockerfile, with no registry, and print its archive's path",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			archive, err := cluster.BuildImage(command.Context(), build, command.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(command.OutOrStdout(), archive)
			return nil
		},
	}
	command.Flags().
		StringVar(&build.Dockerfile, "dockerfile", "Dockerfile", "the Dockerfile; its folder is the build context, BUILDER its base image")
	command.Flags().StringVar(&build.Tag, "tag", "localhost/gpu-dra-driver:dev", "full name of the image")
	command.Flags().StringToStringVar(&build.Arguments, "build-arg", nil, "further build arguments: `NAME=value,…`")
	return command
}

func downCommand(name *string) *cobra.Command {
	var logs string
	command := &cobra.Command{
		Use:   "down",
		Short: "Take the cluster down and remove everything of it, whatever state it is in",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			var unsaved error
			if logs != "" {
				unsaved = cluster.SaveLogs(*name, logs)
			}
			return errors.Join(unsaved, cluster.Down(command.Context(), *name))
		},
	}
	command.Flags().StringVar(&logs, "save-logs", "", "`folder` to copy the logs to before they go")
	return command
}

func statusCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the cluster's machines and where their logs are",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			opened, err := cluster.Open(*name)
			if err != nil {
				return err
			}
			out := command.OutOrStdout()
			fmt.Fprintf(out, "cluster %s, kubeconfig %s\n", opened.Name(), opened.Kubeconfig())
			for _, node := range opened.Machines() {
				power := "off"
				if node.Running() {
					power = "on"
				}
				fmt.Fprintf(out, "%-20s %-3s %-15s %s\n", node.Name(), power, node.Address(), node.LogDir())
			}
			return nil
		},
	}
}
