package main

import (
	"context"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/smi"
)

const fetchTimeout = 2 * time.Minute

func newFetchSMI() *cobra.Command {
	var suite string
	command := &cobra.Command{
		Use:   "fetch-smi",
		Short: "Fetch the real nvidia-smi from Debian's non-free component and print its path (exit code 4 if it is unavailable)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
			defer cancel()
			path, err := smi.Fetch(ctx, suite)
			if err != nil {
				return err
			}
			fmt.Println(path)
			return nil
		},
	}
	command.Flags().StringVar(&suite, "suite", smi.DefaultSuite, "Debian release: bookworm has 535, trixie has 550")
	return command
}
