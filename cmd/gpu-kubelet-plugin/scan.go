package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// runScan is the child's side of nvidia.Isolated: NVML lives in this process, so that whatever it does to it stays here.
// It is not meant for people: inventory is.
func runScan(ctx context.Context, _ []string, out io.Writer) error {
	return nvidia.ServeScan(ctx, os.Stdin, out)
}
