// Demo shows the driver at work on this machine: first a simulated 8-GPU node by itself (its nvidia-smi and what the plugin would offer of it), while
// the programs of a real Kubernetes cluster are built in the background, then the whole: the cluster comes up, the chart is installed, a Pod claims a
// GPU and runs nvidia-smi. It leaves the cluster up for a look around; `demo down` takes everything away. Where nvidia-smi cannot be had, the Pod's
// device nodes are shown instead.
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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// demo is one showing: its cluster and its folder below build/ bear its name.
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
		return errors.New("a node needs device files, mounts and cgroups: run this as root")
	}
	root, err := stand.Root()
	if err != nil {
		return err
	}
	d := demo{root: root, screen: newScreen(os.Stdout)}
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&d.name, "name", "demo", "name of the cluster and of the folder below build/: demos with different names run beside each other")
	flags.BoolVar(&d.withoutSMI, "without-nvidia-smi", false, "show what is shown where nvidia-smi cannot be had")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// The name becomes a path that is removed.
	if !regexp.MustCompile(`^demo[a-z0-9-]*$`).MatchString(d.name) {
		return fmt.Errorf("name %q: want demo and then lower-case letters, digits and dashes", d.name)
	}
	switch flags.Arg(0) {
	case "up":
		return d.up(ctx)
	case "down":
		return d.down(ctx)
	}
	return errors.New("usage: demo [--name NAME] [--without-nvidia-smi] up|down")
}

// down removes whatever up has made, however far it came.
func (d *demo) down(ctx context.Context) error {
	return errors.Join(cluster.Down(ctx, d.name), d.removeStandalone(ctx), os.RemoveAll(d.folder()))
}

func (d *demo) up(ctx context.Context) error {
	if err := os.MkdirAll(d.folder(), 0o755); err != nil {
		return err
	}
	d.screen.title("In the background: the programs of a Kubernetes cluster, built from source. The first time takes a while, later it is a matter of seconds.")
	programs := d.buildInBackground(ctx)
	// However the showing ends, the build has ended before.
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
