package main

import (
	"context"
	"io"
	"os"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/bind"
)

// runBind is the child process that binds a GPU to VFIO or releases it ([bind.Serve]). It ends when
// its standard input does, not at a signal, as runPartition does.
func runBind(ctx context.Context, _ []string, out io.Writer) error {
	return bind.Serve(context.WithoutCancel(ctx), os.Stdin, out)
}
