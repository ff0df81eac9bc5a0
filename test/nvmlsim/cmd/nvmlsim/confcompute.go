package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newConfCompute(n *node) *cobra.Command {
	states := map[string]state.ConfCompute{
		"off": state.ConfComputeOff, "not-ready": state.ConfComputeNotReady, "ready": state.ConfComputeReady,
	}
	return &cobra.Command{
		Use:   "confidential-computing off|not-ready|ready",
		Short: "Set whether the node computes confidentially, and whether its GPUs accept work",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			wanted, known := states[args[0]]
			if !known {
				return fmt.Errorf("%q is none of off, not-ready, ready", args[0])
			}
			return n.with(func(f *state.File) error { return f.SetConfCompute(wanted) })
		},
	}
}
