package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// nodeCommands returns the subcommands that act on one node. Their first argument names the node.
func nodeCommands(name *string) []*cobra.Command {
	act := func(use, short string, action func(context.Context, *cluster.Node) error) *cobra.Command {
		return &cobra.Command{
			Use:   use + " NODE",
			Short: short,
			Args:  cobra.ExactArgs(1),
			RunE: func(command *cobra.Command, args []string) error {
				node, err := openNode(*name, args[0])
				if err != nil {
					return err
				}
				return action(command.Context(), node)
			},
		}
	}
	return []*cobra.Command{
		act(
			"power-cut",
			"Switch a node off at once; its disk stays",
			func(ctx context.Context, node *cluster.Node) error { return node.PowerCut(ctx) },
		),
		act("boot", "Switch a node on and wait until it is Ready", func(ctx context.Context, node *cluster.Node) error { return node.Boot(ctx) }),
		act(
			"restart-kubelet",
			"Restart a node's kubelet; containers go on",
			func(ctx context.Context, node *cluster.Node) error { return node.RestartKubelet(ctx) },
		),
		act(
			"restart-containerd",
			"Restart a node's containerd; containers go on",
			func(ctx context.Context, node *cluster.Node) error { return node.RestartContainerd(ctx) },
		),
		{
			Use:   "service NODE start|stop|restart|kill COMPONENT",
			Short: "Act on one component of a node (or of control-plane), by the name of its log",
			Args:  cobra.ExactArgs(3),
			RunE: func(command *cobra.Command, args []string) error {
				node, err := openNode(*name, args[0])
				if err != nil {
					return err
				}
				return node.Service(command.Context(), args[1], args[2])
			},
		},
		{
			Use:   "exec NODE -- COMMAND [ARGUMENT …]",
			Short: "Run a command on a node",
			Args:  cobra.MinimumNArgs(2),
			RunE: func(command *cobra.Command, args []string) error {
				node, err := openNode(*name, args[0])
				if err != nil {
					return err
				}
				return passOn(node.ExecStreams(command.Context(), os.Stdin, os.Stdout, os.Stderr, args[1:]...))
			},
		},
		logsCommand(name),
	}
}

func openNode(clusterName, nodeName string) (*cluster.Node, error) {
	opened, err := cluster.Open(clusterName)
	if err != nil {
		return nil, err
	}
	return opened.Node(nodeName)
}

// logsCommand returns the subcommand that lists the log files or prints one. It also works on a
// cluster that failed to start, when logs matter most.
func logsCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "logs [NODE [COMPONENT]]",
		Short: "List the log files, or print one",
		Args:  cobra.MaximumNArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			dirs, err := cluster.LogDirs(*name)
			if err != nil {
				return err
			}
			for _, node := range slices.Sorted(maps.Keys(dirs)) {
				if len(args) > 0 && args[0] != node {
					continue
				}
				if err := showLogs(command.OutOrStdout(), dirs[node], args); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func showLogs(out io.Writer, dir string, args []string) error {
	if len(args) == 2 {
		file, err := os.Open(filepath.Join(dir, strings.TrimSuffix(args[1], ".log")+".log"))
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		_, err = io.Copy(out, file)
		return err
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		return err
	}
	for _, file := range files {
		fmt.Fprintln(out, file)
	}
	return nil
}
