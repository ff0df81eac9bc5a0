// Demo shows the driver at work on this machine: first a simulated 8-GPU node by itself (its nvidia-smi and what the plugin would offer of it), while
// the programs of a real Kubernetes cluster are built in the background, then the whole: the cluster comes up, the chart is installed, a Pod claims a
// GPU and runs nvidia-smi. It leaves the cluster up for a look around; `demo down` takes everything away.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// clusterName tells the demo's cluster from those of tests.
const clusterName = "demo"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if os.Geteuid() != 0 {
		return errors.New("a node needs device files, mounts and cgroups: run this as root")
	}
	root, err := stand.Root()
	if err != nil {
		return err
	}
	switch {
	case len(args) == 1 && args[0] == "up":
		return up(ctx, root)
	case len(args) == 1 && args[0] == "down":
		return down(ctx, root)
	}
	return errors.New("usage: demo up|down")
}

// down removes whatever up has made, however far it came.
func down(ctx context.Context, root string) error {
	return errors.Join(cluster.Down(ctx, clusterName), removeStandalone(ctx, root), os.RemoveAll(filepath.Join(root, "build", "demo")))
}

func up(ctx context.Context, root string) error {
	screen := newScreen(os.Stdout)
	if err := os.MkdirAll(filepath.Join(root, "build", "demo"), 0o755); err != nil {
		return err
	}
	// The whole is bound to fail if any part does: one context for all.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	screen.title("In the background: the programs of a Kubernetes cluster, built from source. The first time takes a while, later it is a matter of seconds.")
	programs := buildInBackground(ctx, root, screen)
	sim, err := showStandalone(ctx, root, screen)
	if err != nil {
		return err
	}
	screen.title("Waiting for the cluster's programs")
	if err := <-programs; err != nil {
		return err
	}
	return showCluster(ctx, root, sim, screen)
}
