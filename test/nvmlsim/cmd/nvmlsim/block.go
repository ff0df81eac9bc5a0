package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

var blocks = map[string]state.Block{
	"client-blocks-mode": state.ClientBlocksMode, "client-blocks-destroy": state.ClientBlocksDestroy, "create-in-use": state.CreateInUse,
}

func newBlock(n *node) *cobra.Command {
	return &cobra.Command{
		Use:   "block client-blocks-mode|client-blocks-destroy|create-in-use on|off",
		Short: "Say what is refused as in use though nobody computes",
		Long: "Says what processes that only have NVML open keep others from (IN_USE): changing the MIG mode of a GPU that they have open (client-blocks-mode),\n" +
			"removing an instance that they have a handle of (client-blocks-destroy, on unless the node file says otherwise). With create-in-use the first\n" +
			"try to make the first GPU instance of a GPU is refused so, whoever has it open.",
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			block, known := blocks[args[0]]
			if !known || args[1] != "on" && args[1] != "off" {
				return fmt.Errorf("%q is none of client-blocks-mode, client-blocks-destroy, create-in-use, or %q neither on nor off", args[0], args[1])
			}
			return n.with(func(f *state.File) error { return f.SetBlock(block, args[1] == "on") })
		},
	}
}
