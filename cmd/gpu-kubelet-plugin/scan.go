package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
)

// runScan is the child process that scans the hardware for [scan.Isolated]. It alone loads NVML,
// so that a crash or hang of NVML does not affect the plugin. Users run inventory instead.
func runScan(ctx context.Context, _ []string, out io.Writer) error {
	return scan.Serve(ctx, os.Stdin, out)
}
