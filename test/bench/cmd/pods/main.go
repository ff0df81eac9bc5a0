// pods measures how much later a Pod starts because it claims a GPU: a real cluster with a simulated 8-GPU node and the chart, and in turns a Pod with a
// claim and the same Pod without one, each from its creation until the API server says that its container runs. The hooks that the claim's container is
// made with are part of the difference. The Pod with a claim is also started on a node that has the CDI specs of many other claims, all of which a container
// runtime reads.
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

const (
	// most is how many milliseconds later a Pod with a claim may start at the median, beside the time of its hooks.
	most = 100
	// crowd is how many claims the other ones are, and crowded how much longer a container's start may take beside them.
	crowd   = 499
	crowded = 1.1
	// block is how many Pods are started before the others' specs come or go, since the runtime reads all of them for each that does.
	block = 20

	nodeName = "node1"
)

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
	c, err := cluster.Up(ctx, cluster.Options{Name: name, Nodes: []cluster.NodeOptions{sim.Node(nodeName, "dgx-h100")}, Output: os.Stderr})
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
	node, err := c.Node(nodeName)
	if err != nil {
		return err
	}
	return measure(ctx, meter{client: client, node: node}, count, r)
}

// measure starts Pods of both kinds in turns, so many with nothing else there, and as many beside the specs of other claims.
func measure(ctx context.Context, m meter, count int, r *report.Report) error {
	const program = stand.Release
	if err := m.makeTemplate(ctx); err != nil {
		return err
	}
	var unclaimed, claimed, unclaimedAmong, among starts
	for i := 0; i < count; i += block {
		n := min(block, count-i)
		if err := m.inTurns(ctx, fmt.Sprintf("alone-%d", i), n, &unclaimed, &claimed); err != nil {
			return err
		}
		if err := m.gather(ctx); err != nil {
			return err
		}
		err := m.inTurns(ctx, fmt.Sprintf("among-%d", i), n, &unclaimedAmong, &among)
		if err := errors.Join(err, m.disperse(ctx)); err != nil {
			return err
		}
	}
	of := r.Add("a Pod without a claim, from its creation until it runs", program, &unclaimed.pod)
	row := r.Add("the same Pod with a GPU claimed", program, &claimed.pod).Compare(of)
	r.Add(fmt.Sprintf("the same, beside the CDI specs of %d claims", crowd), program, &among.pod).Compare(row)
	r.Add("making and starting the container without a claim", program, &unclaimed.container)
	r.Add(fmt.Sprintf("the same, beside the CDI specs of %d claims", crowd), program, &unclaimedAmong.container)
	alone := r.Add("making and starting the container with a GPU claimed", program, &claimed.container)
	beside := r.Add(fmt.Sprintf("the same, beside the CDI specs of %d claims", crowd), program, &among.container).Compare(alone)
	r.AtMost("a claimed Pod's start beyond the other's, p50, hooks included", program, row.P50-of.P50, most, "ms")
	r.AtMost(fmt.Sprintf("making and starting a container, %d claims to 1, p50", crowd+1), program, beside.Ratio50, crowded, "x")
	return nil
}

// inTurns starts so many Pods of each kind. The first of each is not counted: what is only made once is there then.
func (m meter) inTurns(ctx context.Context, name string, count int, unclaimed, claimed *starts) error {
	for i := range count + 1 {
		without, err := m.start(ctx, fmt.Sprintf("%s-without-%d", name, i), false)
		if err != nil {
			return err
		}
		with, err := m.start(ctx, fmt.Sprintf("%s-with-%d", name, i), true)
		if err != nil {
			return err
		}
		if i > 0 {
			unclaimed.add(without)
			claimed.add(with)
		}
	}
	return nil
}
