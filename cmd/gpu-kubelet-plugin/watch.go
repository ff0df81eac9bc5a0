package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// runWatch is the child's side of nvidia.Watch. It ends with its input, not by a signal: who listens to the hardware decides when that is over.
func runWatch(ctx context.Context, _ []string, out io.Writer) error {
	return nvidia.ServeWatch(context.WithoutCancel(ctx), os.Stdin, out)
}
