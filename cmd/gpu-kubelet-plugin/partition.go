package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
)

// runPartition is the child process that changes MIG partitions for the plugin
// ([cut.Serve]). It ends when its standard input does, not at a signal. A signal to
// the process group must not interrupt a MIG change that the plugin waits for.
func runPartition(_ context.Context, _ []string, out io.Writer) error {
	return cut.Serve(os.Stdin, out)
}
