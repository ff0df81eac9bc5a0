// scale measures what a large cluster's scheduler pays for the shapes that each node publishes: the slices that the production plugin publishes for a simulated
// node, copied to hundreds of Node objects without kubelets, in a real API server, and claims with Pods that the real scheduler allocates and binds.
//
// The scheduler is that of the test cluster's release, as it is and without the one condition that its successor took away, each in a cluster of its own. What is
// compared was measured in the same run; how the cost grows with the number of nodes says what a larger cluster would cost.
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
	"k8s.io/client-go/rest"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// The schedulers, by the names that the flag has for them, and their programs for [cluster.Options].
const (
	fixed   = "fixed"
	asBuilt = "as-built"
)

var schedulers = map[string]string{fixed: cluster.SchedulerOfOwnNodes, asBuilt: ""}

// gates are those that the test cluster sets and that nobody has set who uses the release as it comes: one of them alone, DRANodeAllocatableResources, has the
// scheduler list all slices for every node.
var gates = map[string]bool{
	"DRADeviceTaintRules": false, "DRAListTypeAttributes": false, "DRANodeAllocatableResources": false, "DRAResourcePoolStatus": false,
	"DRAWorkloadResourceClaims": false, "GenericWorkload": false,
}

type options struct {
	program    string
	schedulers []string
	layouts    []string
	nodes      []int
	claims     int
	limit      time.Duration
	profiles   string
	json       string
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
	names := flag.String("schedulers", fixed+","+asBuilt, fixed+": without the condition that Kubernetes 1.37 took away; "+asBuilt+": as the release has it")
	layouts := flag.String("layouts", strings.Join([]string{wholeOnly, static, everyShape}, ","), "what the nodes publish")
	flag.StringVar(&o.program, "program", "build/bin/gpu-kubelet-plugin", "the plugin's program")
	flag.IntVar(&o.claims, "claims", 200, "how many claims are allocated at each size")
	flag.DurationVar(&o.limit, "limit", 5*time.Minute, "how long the claims of one measurement may take; what was done until then makes the rate, and larger sizes are left out")
	flag.StringVar(&o.profiles, "profiles", "", "folder for a profile of the scheduler's CPU from each measurement's first seconds")
	flag.StringVar(&o.json, "json", "", "file for the figures as JSON")
	flag.Parse()
	for _, n := range strings.Split(*nodes, ",") {
		count, err := strconv.Atoi(n)
		if err != nil || count < 1 {
			return o, fmt.Errorf("--nodes: %q is no number of nodes", n)
		}
		o.nodes = append(o.nodes, count)
	}
	o.schedulers, o.layouts = strings.Split(*names, ","), strings.Split(*layouts, ",")
	for _, name := range o.schedulers {
		if _, known := schedulers[name]; !known {
			return o, fmt.Errorf("--schedulers: there is none called %q", name)
		}
	}
	for _, name := range o.layouts {
		if _, known := classesOf[name]; !known {
			return o, fmt.Errorf("--layouts: there is none called %q", name)
		}
	}
	var err error
	o.program, err = filepath.Abs(o.program)
	return o, err
}

func run(ctx context.Context) error {
	o, err := parse()
	if err != nil {
		return err
	}
	s := &scale{options: o, costs: map[key]cost{}}
	for _, s.scheduler = range o.schedulers {
		if err := s.onCluster(ctx); err != nil {
			return errors.Join(err, s.print()) // what was measured until then took long enough
		}
	}
	return s.print()
}

// onCluster measures with one scheduler.
func (s *scale) onCluster(ctx context.Context) (err error) {
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
	c, err := cluster.Up(ctx, cluster.Options{Name: name, ControlPlaneOnly: true, FeatureGates: gates, Scheduler: schedulers[s.scheduler], Output: os.Stderr})
	if err != nil {
		return err
	}
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 2000, 2000
	if s.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if s.schedulerConfig, err = c.SchedulerRESTConfig(); err != nil {
		return err
	}
	if err := s.classes(ctx); err != nil {
		return err
	}
	options := node.Options{Folder: folder, GPUs: 8, Binary: s.program, Kubeconfig: c.Kubeconfig(), Client: s.client}
	if err := s.models(ctx, options); err != nil {
		return err
	}
	return s.measure(ctx)
}

func (s *scale) print() error {
	for _, s.scheduler = range s.schedulers {
		s.conclude()
	}
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

// key is a kind of claim on nodes of a layout, for a scheduler.
type key struct {
	scheduler, layout, class string
	nodes                    int
}

// cost is what claims of a kind took.
type cost struct {
	// perSecond is what a user sees, on a machine on which everything runs; processor is the scheduler's own part of each claim.
	perSecond float64
	processor time.Duration
}

// conclude compares what one scheduler did, as far as it came.
func (s *scale) conclude() {
	at := func(layout, class string, nodes int) cost { return s.costs[key{s.scheduler, layout, class, nodes}] }
	atLeast := func(what, layout, class, of string, limit float64) {
		for _, n := range s.nodes {
			if here, there := at(layout, class, n), at(of, class, n); here.perSecond > 0 && there.perSecond > 0 {
				s.report.AtLeast(fmt.Sprintf("%s a second, every shape, to %s, %d nodes", what, of, n), s.scheduler, here.perSecond/there.perSecond, limit, "×")
				s.report.AtMost(fmt.Sprintf("the scheduler's processor, %s, every shape, to %s, %d nodes", what, of, n), s.scheduler,
					here.processor.Seconds()/there.processor.Seconds(), 1/limit, "×")
			}
		}
	}
	atLeast("whole-GPU claims", everyShape, wholeClass, wholeOnly, 0.5)
	atLeast("1g MIG claims", everyShape, migClass, static, 0.25)
	first, last := s.nodes[0], s.nodes[len(s.nodes)-1]
	for _, layout := range s.layouts {
		for _, class := range classesOf[layout] {
			few, many := at(layout, class, first), at(layout, class, last)
			if first == last || few.perSecond == 0 || many.perSecond == 0 {
				continue
			}
			growth, more := few.perSecond/many.perSecond, float64(last)/float64(first)
			s.report.AtMost(fmt.Sprintf("cost of a claim of %s, %s, %d to %d nodes", class, layout, first, last), s.scheduler, growth, more, "×")
			// A straight line through the smallest and the largest size.
			slope := (many.processor - few.processor) / time.Duration(last-first)
			fmt.Fprintf(os.Stderr, "%s, %s, %s: %s of the scheduler's processor a claim at %d nodes, %s at %d, so %s at 5000 on a straight line\n",
				s.scheduler, layout, class, few.processor, first, many.processor, last, many.processor+slope*time.Duration(5000-last))
		}
	}
}

type scale struct {
	options

	costs  map[key]cost
	report report.Report

	// Of the cluster that is up.
	scheduler string
	client    kubernetes.Interface
	// schedulerConfig is for the scheduler's own port.
	schedulerConfig *rest.Config
	layout          map[string]layout
	// generation counts the layouts that have been measured.
	generation int
}
