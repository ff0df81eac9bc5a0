package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// clientCommands returns the subcommands for a cluster's users: kubeconfig, load-image, program,
// kubectl and helm. *name is the cluster's name.
func clientCommands(name *string) []*cobra.Command {
	commands := []*cobra.Command{
		{
			Use:   "kubeconfig",
			Short: "Print the path of the administrator's kubeconfig",
			Args:  cobra.NoArgs,
			RunE: func(command *cobra.Command, _ []string) error {
				opened, err := cluster.Open(*name)
				if err != nil {
					return err
				}
				fmt.Fprintln(command.OutOrStdout(), opened.Kubeconfig())
				return nil
			},
		},
		{
			Use:   "load-image ARCHIVE [NODE …]",
			Short: "Load the images of an archive (OCI layout or docker) on the named nodes, or on all",
			Args:  cobra.MinimumNArgs(1),
			RunE: func(command *cobra.Command, args []string) error {
				opened, err := cluster.Open(*name)
				if err != nil {
					return err
				}
				return opened.LoadImage(command.Context(), args[0], args[1:]...)
			},
		},
		programCommand(),
	}
	for _, program := range []string{"kubectl", "helm"} {
		commands = append(commands, &cobra.Command{
			Use:   program + " -- ARGUMENT …",
			Short: "Run " + program + " as the cluster's administrator",
			RunE: func(command *cobra.Command, args []string) error {
				opened, err := cluster.Open(*name)
				if err != nil {
					return err
				}
				client, err := opened.ClientCommand(command.Context(), program, args...)
				if err != nil {
					return err
				}
				client.Stdin, client.Stdout, client.Stderr = os.Stdin, os.Stdout, os.Stderr
				return passOn(client.Run())
			},
		})
	}
	return commands
}

func programCommand() *cobra.Command {
	var options cluster.Options
	command := &cobra.Command{
		Use:   "program NAME",
		Short: "Build a program unless it is in the cache, and print its path: kubectl, helm, ctr, runc, …",
		Args:  cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			path, err := cluster.BuildProgram(command.Context(), args[0], options, command.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(command.OutOrStdout(), path)
			return nil
		},
	}
	addVersionFlags(command, &options)
	return command
}
