// scale measures what a large cluster's scheduler pays for the shapes that each node publishes: the slices that the production plugin publishes for a simulated
// node, copied to hundreds of Node objects without kubelets, in a real API server, and claims with Pods that the real scheduler allocates and binds.
//
// What is compared was measured in the same run; how the cost grows with the number of nodes says what a larger cluster would cost.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

type options struct {
	program string
	nodes   []int
	claims  int
	json    string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func parse() (options, error) {
	var o options
	nodes := flag.String("nodes", "50,150,500", "how many nodes, in ascending order")
	flag.StringVar(&o.program, "program", "build/bin/gpu-kubelet-plugin", "the plugin's program")
	flag.IntVar(&o.claims, "claims", 200, "how many claims are allocated at each size")
	flag.StringVar(&o.json, "json", "", "file for the figures as JSON")
	flag.Parse()
	for _, n := range strings.Split(*nodes, ",") {
		count, err := strconv.Atoi(n)
		if err != nil || count < 1 {
			return o, fmt.Errorf("--nodes: %q is no number of nodes", n)
		}
		o.nodes = append(o.nodes, count)
	}
	var err error
	o.program, err = filepath.Abs(o.program)
	return o, err
}

func run(ctx context.Context) (err error) {
	o, err := parse()
	if err != nil {
		return err
	}
	name := fmt.Sprintf("scale%d", os.Getpid()%1000000)
	folder, err := os.MkdirTemp("", "scale-")
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, cluster.Down(end, name), os.RemoveAll(folder))
	}()
	c, err := cluster.Up(ctx, cluster.Options{Name: name, ControlPlaneOnly: true, Output: os.Stderr})
	if err != nil {
		return err
	}
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 2000, 2000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	s := &scale{options: o, client: client}
	if err := s.classes(ctx); err != nil {
		return err
	}
	options := node.Options{Folder: folder, GPUs: 8, Binary: o.program, Kubeconfig: c.Kubeconfig(), Client: client}
	if err := s.layouts(ctx, options); err != nil {
		return err
	}
	if err := s.measure(ctx); err != nil {
		return err
	}
	return s.print()
}

func (s *scale) print() error {
	s.conclude()
	if err := s.report.Table(os.Stdout); err != nil {
		return err
	}
	if s.json == "" {
		return nil
	}
	f, err := os.Create(s.json)
	if err != nil {
		return err
	}
	return errors.Join(s.report.JSON(f), f.Close())
}

// key is a kind of claim on nodes of a layout.
type key struct {
	layout, class string
	nodes         int
}

// conclude compares.
func (s *scale) conclude() {
	last := s.nodes[len(s.nodes)-1]
	rate := func(layout, class string, nodes int) float64 { return s.rates[key{layout, class, nodes}] }
	at := fmt.Sprintf(", %d nodes", last)
	s.report.AtLeast("whole-GPU claims a second, every shape, to whole GPUs only"+at, "scheduler", rate(everyShape, wholeClass, last)/rate(wholeOnly, wholeClass, last), 0.5, "×")
	s.report.AtLeast("1g MIG claims a second, every shape, to 56 static devices"+at, "scheduler", rate(everyShape, migClass, last)/rate(static, migClass, last), 0.25, "×")
	if first := s.nodes[0]; first < last {
		more := float64(last) / float64(first)
		for _, class := range []string{wholeClass, migClass} {
			growth := rate(everyShape, class, first) / rate(everyShape, class, last)
			s.report.AtMost(fmt.Sprintf("cost of a claim of %s, %d to %d nodes", class, first, last), "scheduler", growth, more, "×")
			// A straight line through the smallest and the largest size.
			low, high := 1000/rate(everyShape, class, first), 1000/rate(everyShape, class, last)
			slope := (high - low) / float64(last-first)
			fmt.Fprintf(os.Stderr, "%s, every shape: %.1f ms a claim at %d nodes, %.1f at %d, so %.1f at 5000\n", class, low, first, high, last, high+slope*float64(5000-last))
		}
	}
}

type scale struct {
	options

	client kubernetes.Interface
	layout map[string]layout
	rates  map[key]float64
	// generation counts the layouts that have been measured.
	generation int
	report     report.Report
}
