// kubectl-gpu is a kubectl plugin (kubectl gpu …) for people on call: why a claim waits, what the
// fleet does, and what is wrong with it. It only reads. Every command works with a cluster, by any
// kubeconfig, and with an archive of `kubectl gpu gather` (--archive).
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/paint"
)

// version is the program's version, which the linker sets.
var version = "devel"

const (
	exitFailed = 1
	// exitFindings is the exit code of doctor and migrate check if they found something.
	exitFindings = 3
)

// memoryLimit makes the garbage collector work harder before the process has 500 MB.
const memoryLimit = 480 << 20

// errFindings ends a command with exitFindings. The findings are its output.
var errFindings = errors.New("findings")

// completer is the name by which kubectl calls a program that completes "kubectl gpu …". Users link
// it to this one.
// https://github.com/kubernetes/kubernetes/blob/v1.37.0/staging/src/k8s.io/kubectl/pkg/cmd/plugin_completion.go
const completer = "kubectl_complete-gpu"

// arguments returns the arguments of the command.
func arguments(all []string) []string {
	if filepath.Base(all[0]) == completer {
		return append([]string{cobra.ShellCompRequestCmd}, all[1:]...)
	}
	return all[1:]
}

func main() {
	// The first signal cancels ctx. A second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	debug.SetMemoryLimit(memoryLimit)
	c := newCommand(paint.Out(os.Stdout), os.Stderr)
	c.SetArgs(arguments(os.Args))
	err := c.ExecuteContext(ctx)
	switch {
	case err == nil:
	case errors.Is(err, errFindings):
		os.Exit(exitFindings)
	default:
		fmt.Fprintln(os.Stderr, "kubectl gpu:", err)
		os.Exit(exitFailed)
	}
}
