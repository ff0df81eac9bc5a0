// pods measures how much later a Pod starts because it claims a GPU: a real cluster with a simulated 8-GPU node and the chart, and in turns a Pod with a
// claim and the same Pod without one, each from its creation until the API server says that its container runs. The hooks that the claim's container is
// made with are part of the difference.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/stand"
)

// most is how many milliseconds later a Pod with a claim may start at the median, beside the time of its hooks.
const most = 100

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "pods:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	count := flag.Int("pods", 100, "how many Pods of each kind are started, one after the other")
	file := flag.String("json", "", "file for the figures as JSON")
	flag.Parse()
	if os.Geteuid() != 0 {
		return errors.New("this needs root, for a node's device files, mounts and namespaces")
	}
	var r report.Report
	load, _ := os.ReadFile("/proc/loadavg")
	r.Machine = fmt.Sprintf("load average at the beginning %.14s", load)
	if err := onCluster(ctx, *count, &r); err != nil {
		return err
	}
	if *file != "" {
		f, err := os.Create(*file)
		if err == nil {
			err = errors.Join(r.JSON(f), f.Close())
		}
		if err != nil {
			return err
		}
	}
	return r.Table(os.Stdout)
}

// onCluster has a cluster with the chart for as long as it measures.
func onCluster(ctx context.Context, count int, r *report.Report) (err error) {
	root, err := stand.Root()
	if err != nil {
		return err
	}
	sim, err := stand.BuildSimulator(ctx, root, os.Stderr)
	if err != nil {
		return err
	}
	archive, err := stand.BuildImage(ctx, root, os.Stderr)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("pods%d", os.Getpid()%1000000)
	defer func() {
		// The machine is left as it was found, whatever ended this.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, cluster.Down(end, name))
	}()
	c, err := cluster.Up(ctx, cluster.Options{Name: name, Nodes: []cluster.NodeOptions{sim.Node("node1", "dgx-h100")}, Output: os.Stderr})
	if err != nil {
		return err
	}
	if err := errors.Join(c.LoadImage(ctx, archive), stand.Install(ctx, c, root)); err != nil {
		return err
	}
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	return measure(ctx, client, count, r)
}

// measure starts Pods of both kinds in turns. The first of each is not counted: what is only made once is there then.
func measure(ctx context.Context, client kubernetes.Interface, count int, r *report.Report) error {
	const program = stand.Release
	m := meter{client: client}
	if err := m.makeTemplate(ctx); err != nil {
		return err
	}
	var claimed, unclaimed report.Samples
	for i := range count + 1 {
		without, err := m.start(ctx, fmt.Sprintf("without-%d", i), false)
		if err != nil {
			return err
		}
		with, err := m.start(ctx, fmt.Sprintf("with-%d", i), true)
		if err != nil {
			return err
		}
		if i > 0 {
			unclaimed.All, claimed.All = append(unclaimed.All, without), append(claimed.All, with)
		}
	}
	of := r.Add("a Pod without a claim, from its creation until it runs", program, &unclaimed)
	row := r.Add("the same Pod with a GPU claimed", program, &claimed).Compare(of)
	r.AtMost("a claimed Pod's start beyond the other's, p50, hooks included", program, row.P50-of.P50, most, "ms")
	return nil
}
