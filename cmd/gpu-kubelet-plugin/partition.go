package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// runPartition is the worker's side of nvidia.Partitions. It ends with its input, not by a signal: one that ends the whole group of processes must
// not interrupt a cut that the plugin waits for.
func runPartition(ctx context.Context, _ []string, out io.Writer) error {
	return nvidia.ServePartitions(context.WithoutCancel(ctx), os.Stdin, out)
}
