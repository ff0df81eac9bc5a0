package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func newAttach(n *node) []*cobra.Command {
	return []*cobra.Command{newAttachCost(n), newMemoryInfo(n), newConfCompute(n)}
}

func newAttachCost(n *node) *cobra.Command {
	return &cobra.Command{
		Use:   "attach-cost DURATION",
		Short: "Set how long the driver takes to open a closed GPU, one GPU after another",
		Long: "Sets how long the driver takes to open a closed GPU. GPUs attach one after another, under the driver's lock.\n" +
			"With a cost they lose persistence mode, which would keep them open; with 0 they have it again.",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			cost, err := time.ParseDuration(args[0])
			if err != nil || cost < 0 {
				return fmt.Errorf("%q is no duration such as 300ms or 3s", args[0])
			}
			return n.with(func(f *state.File) error { return f.SetAttachCost(cost) })
		},
	}
}

func newMemoryInfo(n *node) *cobra.Command {
	return onGPU(n, "memory-info GPU on|off", "Set whether NVML reports a GPU's memory sizes or returns NOT_SUPPORTED", 2,
		func(f *state.File, gpu int, args []string) error {
			if args[0] != "on" && args[0] != "off" {
				return fmt.Errorf("%q is neither on nor off", args[0])
			}
			return f.SetMemoryInfo(gpu, args[0] == "on")
		})
}
