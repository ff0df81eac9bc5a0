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
		Short: "Set which calls return IN_USE although no process computes",
		Long: "Sets which calls return IN_USE because another process has NVML open: a change of the MIG mode of its open GPU\n" +
			"(client-blocks-mode), or the removal of an instance with a handle (client-blocks-destroy, on by default).\n" +
			"With create-in-use the first creation of a GPU's first instance fails, with or without open handles.",
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
