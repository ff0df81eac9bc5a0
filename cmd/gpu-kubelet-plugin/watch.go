package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
)

// runWatch is the child process that watches the GPUs' events for [watch.Run]. It ends when its
// standard input does, not at a signal: the plugin decides when to end it.
func runWatch(ctx context.Context, _ []string, out io.Writer) error {
	return watch.Serve(context.WithoutCancel(ctx), os.Stdin, out)
}
