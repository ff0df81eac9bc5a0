// Command nvmlsim makes and controls simulated GPU nodes: it lays a node out, shows its state, and breaks and mends it while
// processes use it.
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

// Exit codes that scripts decide on.
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

// node is the simulated node that a command works on.
type node struct {
	root, statePath string
}

// open maps the node's state.
func (n *node) open() (*state.File, error) {
	if n.statePath != "" {
		return state.Open(n.statePath)
	}
	return state.Open(layout.StatePath(n.root))
}

// with runs a change on the node's state.
func (n *node) with(change func(*state.File) error) error {
	f, err := n.open()
	if err != nil {
		return err
	}
	return errors.Join(change(f), f.Close())
}

// withLayout runs a change that also redraws the layout.
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
		Short:         "Make and control simulated GPU nodes",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := command.PersistentFlags()
	flags.StringVar(&n.root, "root", layout.DefaultRoot, "the layout's folder")
	flags.StringVar(&n.statePath, "state", os.Getenv("NVMLSIM_STATE"), "state file, where it is not in the layout's folder (NVMLSIM_STATE)")
	command.AddCommand(newShow(n), newLayout(n), newDriver(n), newFetchSMI(), newCompile())
	command.AddCommand(newFaults(n)...)
	command.AddCommand(newHealth(n)...)
	command.AddCommand(newMIG(n)...)
	command.AddCommand(newAttach(n)...)
	return command
}
