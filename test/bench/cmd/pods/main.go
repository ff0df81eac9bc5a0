// pods measures how much longer a Pod takes to start if it has a claim for a GPU. On a real cluster
// with a simulated 8-GPU node and the chart, it alternately starts a Pod with a claim and the same
// Pod without. The time runs from the Pod's creation until the API server reports a running
// container. It includes the container's CDI hooks.
//
// pods also starts both Pods on a node with the CDI specs of many other claims, because a container
// runtime reads all specs.
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

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

const (
	// mostDelay limits how much longer a Pod with a claim takes than one without, in milliseconds. It
	// applies to the medians.
	mostDelay = 100
	// otherClaims is the number of claims whose CDI specs are added to the node. mostSlowdown limits
	// how many times longer a container then takes to start.
	otherClaims  = 499
	mostSlowdown = 1.1
	// block is the number of Pods between two changes of the added CDI specs. After each change the
	// runtime reads all specs again.
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
	count := flag.Int("pods", 100, "number of Pods of each kind")
	file := flag.String("json", "", "file for the figures as JSON")
	flag.Parse()
	if os.Geteuid() != 0 {
		return errors.New("this needs root, for a node's device files, mounts and namespaces")
	}
	var r report.Report
	load, _ := os.ReadFile("/proc/loadavg")
	r.Machine = fmt.Sprintf("load average at the start %.14s", load)
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

// onCluster starts a cluster with the chart, measures there, and deletes the cluster.
func onCluster(ctx context.Context, count int, r *report.Report) (err error) {
	root, err := clusterharness.Root()
	if err != nil {
		return err
	}
	sim, err := clusterharness.BuildSimulator(ctx, root, os.Stderr)
	if err != nil {
		return err
	}
	archive, err := clusterharness.BuildImage(ctx, root, os.Stderr)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("pods%d", os.Getpid()%1000000)
	defer func() {
		// Clean up even after an interrupt, which has ended ctx.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, cluster.Down(end, name))
	}()
	c, err := cluster.Up(ctx, cluster.Options{Name: name, Nodes: []cluster.NodeOptions{sim.Node(nodeName, "dgx-h100")}, Output: os.Stderr})
	if err != nil {
		return err
	}
	if err := errors.Join(c.LoadImage(ctx, archive), clusterharness.Install(ctx, c, root)); err != nil {
		return err
	}
	client, err := c.Client()
	if err != nil {
		return err
	}
	node, err := c.Node(nodeName)
	if err != nil {
		return err
	}
	return measure(ctx, meter{client: client, node: node}, count, r)
}

// measure starts count Pods with and without a claim, alternately. It does so first without other
// CDI specs on the node, and then with those of many claims.
func measure(ctx context.Context, m meter, count int, r *report.Report) error {
	const program = clusterharness.Release
	if err := m.makeTemplate(ctx); err != nil {
		return err
	}
	var unclaimed, claimed, unclaimedAmong, among starts
	for i := 0; i < count; i += block {
		n := min(block, count-i)
		if err := m.interleaved(ctx, fmt.Sprintf("alone-%d", i), n, &unclaimed, &claimed); err != nil {
			return err
		}
		if err := m.addSpecs(ctx); err != nil {
			return err
		}
		err := m.interleaved(ctx, fmt.Sprintf("among-%d", i), n, &unclaimedAmong, &among)
		if err := errors.Join(err, m.removeSpecs(ctx)); err != nil {
			return err
		}
	}
	of := r.Add("a Pod without a claim, from its creation until it runs", program, &unclaimed.pod)
	row := r.Add("the same Pod with a GPU claimed", program, &claimed.pod).Compare(of)
	r.Add(fmt.Sprintf("the same, with the CDI specs of %d claims", otherClaims), program, &among.pod).Compare(row)
	r.Add("creating and starting the container without a claim", program, &unclaimed.container)
	r.Add(fmt.Sprintf("the same, with the CDI specs of %d claims", otherClaims), program, &unclaimedAmong.container)
	alone := r.Add("creating and starting the container with a GPU claimed", program, &claimed.container)
	amongRow := r.Add(fmt.Sprintf("the same, with the CDI specs of %d claims", otherClaims), program, &among.container).Compare(alone)
	r.AtMost("a claimed Pod's start beyond the other's, p50, hooks included", program, row.P50-of.P50, mostDelay, "ms")
	r.AtMost(fmt.Sprintf("creating and starting a container, %d claims to 1, p50", otherClaims+1), program, amongRow.Ratio50, mostSlowdown,
		"x")
	return nil
}

// interleaved alternately starts count Pods without and with a claim, and adds their times to
// unclaimed and claimed. The first Pod of each kind does not count, because it causes one-time
// work.
func (m meter) interleaved(ctx context.Context, name string, count int, unclaimed, claimed *starts) error {
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
