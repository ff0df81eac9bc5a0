package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newHealth(n *node) []*cobra.Command {
	return []*cobra.Command{newLose(n), newRestore(n), newXID(n), newECC(n), newRecovery(n)}
}

const gpuHelp = "GPU is an index in the order of PCI addresses, a UUID or a PCI address."

// onGPU is a command whose first argument names a GPU.
func onGPU(n *node, use, short string, args int, change func(f *state.File, gpu int, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: short + ".\n" + gpuHelp, Args: cobra.ExactArgs(args),
		RunE: func(_ *cobra.Command, args []string) error {
			return n.with(func(f *state.File) error {
				gpu, err := f.Find(args[0])
				if err != nil {
					return err
				}
				return change(f, gpu, args[1:])
			})
		},
	}
}

func newLose(n *node) *cobra.Command {
	return onGPU(n, "lose GPU", "Drop a GPU off the bus: XID 79, then GPU_IS_LOST; at the next driver load it is gone", 1,
		func(f *state.File, gpu int, _ []string) error { return f.Lose(gpu) })
}

func newRestore(n *node) *cobra.Command {
	return onGPU(n, "restore GPU", "Bring a lost GPU back", 1,
		func(f *state.File, gpu int, _ []string) error { return f.Restore(gpu) })
}

func newXID(n *node) *cobra.Command {
	return &cobra.Command{
		Use: "xid GPU[/GI/CI] CODE", Short: "Report an XID, on a GPU or on one of its compute instances", Long: "Reports an XID.\n" + gpuHelp, Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			code, err := strconv.ParseUint(args[1], 10, 32)
			if err != nil {
				return fmt.Errorf("%q is no XID code", args[1])
			}
			return n.with(func(f *state.File) error {
				gpu, on, err := findPlace(f, args[0])
				if err != nil {
					return err
				}
				if on.InInstance {
					return f.XIDOn(gpu, on.Instance, on.Compute, code)
				}
				return f.XID(gpu, code)
			})
		},
	}
}

func newECC(n *node) *cobra.Command {
	return onGPU(n, "ecc GPU single|double", "Count and report a memory error", 2, func(f *state.File, gpu int, args []string) error {
		if args[0] != "single" && args[0] != "double" {
			return fmt.Errorf("%q is neither single nor double", args[0])
		}
		return f.ECC(gpu, args[0] == "double")
	})
}

func newRecovery(n *node) *cobra.Command {
	return onGPU(n, "recovery GPU ACTION", "Set the recovery action that a GPU asks for: none, gpu-reset, node-reboot, drain-p2p, drain-and-reset", 2,
		func(f *state.File, gpu int, args []string) error {
			action, err := state.ParseRecovery(args[0])
			if err != nil {
				return err
			}
			return f.SetRecovery(gpu, action)
		})
}
