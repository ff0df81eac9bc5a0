// Demo shows the driver on this machine. First it shows a simulated node with 8 GPUs alone: the
// output of nvidia-smi, and what the plugin would offer. In the background it builds the programs
// of a real Kubernetes cluster. Then it starts that cluster and installs the chart. A Pod claims a
// GPU and runs nvidia-smi. If nvidia-smi is unavailable, the demo shows the Pod's device nodes
// instead.
//
// The cluster stays up, so that the user can look around. `demo down` removes everything.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// demo is one run of the demo. name is also the name of the cluster and of the folder below build/.
type demo struct {
	name, root string
	withoutSMI bool
	screen     *screen
}

func (d *demo) folder() string { return filepath.Join(d.root, "build", d.name) }

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
		return errors.New("the simulated node needs device files, mounts and cgroups: run the demo as root")
	}
	root, err := clusterharness.Root()
	if err != nil {
		return err
	}
	d := demo{root: root, screen: newScreen(os.Stdout)}
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&d.name, "name", "demo", "name of the cluster and of the folder below build/; demos with different names "+
		"can run at the same time")
	flags.BoolVar(&d.withoutSMI, "without-nvidia-smi", false, "show the demo for machines without nvidia-smi")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// Restrict the name, because it is part of a path that `demo down` removes.
	if !regexp.MustCompile(`^demo[a-z0-9-]*$`).MatchString(d.name) {
		return fmt.Errorf("name %q: want demo, followed by lower-case letters, digits and dashes", d.name)
	}
	switch flags.Arg(0) {
	case "up":
		return d.up(ctx)
	case "down":
		return d.down(ctx)
	}
	return errors.New("usage: demo [--name NAME] [--without-nvidia-smi] up|down")
}

// down removes everything that up created, also after up failed.
func (d *demo) down(ctx context.Context) error {
	return errors.Join(cluster.Down(ctx, d.name), d.removeStandalone(ctx), os.RemoveAll(d.folder()))
}

func (d *demo) up(ctx context.Context) error {
	if err := os.MkdirAll(d.folder(), 0o755); err != nil {
		return err
	}
	d.screen.title("In the background: building the programs of a Kubernetes cluster from source. The first time takes a while, " +
		"later runs take seconds.")
	programs := d.buildInBackground(ctx)
	// End the background build before this function returns, also after an error.
	defer programs.stop()
	sim, err := d.showStandalone(ctx)
	if err != nil {
		return err
	}
	d.screen.title("Waiting for the cluster's programs")
	if err := programs.wait(); err != nil {
		return err
	}
	return d.showCluster(ctx, sim)
}
