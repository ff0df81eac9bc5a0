// Command nvmlsim creates and controls simulated GPU nodes. It creates the files of a node, shows
// the node's state, and injects and repairs hardware faults while processes use the node.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// Exit codes by which scripts tell failures apart.
const (
	exitFailed      = 1
	exitInUse       = 3
	exitUnavailable = 4
)

func main() {
	if err := newCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "nvmlsim:", err)
		os.Exit(exitCode(err))
	}
}

func exitCode(err error) int {
	switch {
	case errors.Is(err, state.ErrInUse), errors.Is(err, state.ErrBusy):
		return exitInUse
	case errors.Is(err, smi.ErrUnavailable):
		return exitUnavailable
	}
	return exitFailed
}

// node says which simulated node a command works on: the one whose files are in the folder root, or
// only the state file at statePath if statePath is set.
type node struct {
	root, statePath string
}

// open maps the simulated node's state file into this process. The state file holds the state of
// all GPUs and the driver.
func (n *node) open() (*state.File, error) {
	if n.statePath != "" {
		return state.Open(n.statePath)
	}
	return state.Open(layout.StatePath(n.root))
}

// with opens the node's state file, calls change with the file, and closes it.
func (n *node) with(change func(*state.File) error) error {
	f, err := n.open()
	if err != nil {
		return err
	}
	return errors.Join(change(f), f.Close())
}

// withLayout calls change with the configuration and the state file of the simulated node.
func (n *node) withLayout(change func(*layout.Config, *state.File) error) error {
	config, err := layout.Load(n.root)
	if err != nil {
		return err
	}
	return n.with(func(f *state.File) error { return change(config, f) })
}

func newCommand() *cobra.Command {
	n := &node{}
	command := &cobra.Command{
		Use:           "nvmlsim",
		Short:         "Create and control simulated GPU nodes",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := command.PersistentFlags()
	flags.StringVar(&n.root, "root", layout.DefaultRoot, "the layout's folder")
	flags.StringVar(&n.statePath, "state", os.Getenv("NVMLSIM_STATE"), "state file outside the layout's folder (NVMLSIM_STATE)")
	command.AddCommand(newShow(n), newLayout(n), newDriver(n), newFetchSMI(), newCompile())
	command.AddCommand(newFaults(n)...)
	command.AddCommand(newHealth(n)...)
	command.AddCommand(newMIG(n)...)
	command.AddCommand(newAttach(n)...)
	command.AddCommand(newSysfs(n)...)
	return command
}
