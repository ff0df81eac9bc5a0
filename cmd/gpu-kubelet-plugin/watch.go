package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// runWatch is the child process that watches the GPUs' events for [nvidia.Watch]. It ends when its
// standard input does, not at a signal: the plugin decides when to end it.
func runWatch(ctx context.Context, _ []string, out io.Writer) error {
	return nvidia.ServeWatch(context.WithoutCancel(ctx), os.Stdin, out)
}
