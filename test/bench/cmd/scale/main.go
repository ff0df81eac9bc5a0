// scale measures how the nodes' slices affect the speed of the scheduler in a large cluster.
//
// It takes the slices that the production plugin publishes for a simulated node, and creates them
// for hundreds of Node objects without kubelets in a real API server. The real scheduler allocates
// claims and binds their Pods. Each version of Kubernetes has a cluster of its own, with that
// version's defaults. scale alternates between layouts of the nodes, and compares medians.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
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

type options struct {
	program    string
	kubernetes []string
	layouts    []layout
	nodes      []int
	// mostDynamic is the largest number of nodes for the layout in which each node publishes every
	// placement.
	mostDynamic int
	claims      int
	rounds      int
	limit       time.Duration
	profiles    string
	json        string
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
	var names []string
	for _, l := range layouts {
		names = append(names, l.name)
	}
	versions := flag.String("kubernetes", "v1.37.2,v1.36.3", "versions of Kubernetes, built first unless they are in the build cache")
	nodes := flag.String("nodes", "50,500", "numbers of nodes in ascending order; the layout mixed has a tenth more, with partitions")
	chosen := flag.String("layouts", strings.Join(names, ","), "what the nodes publish; all are compared with "+whole)
	flag.StringVar(&o.program, "program", "build/bin/gpu-kubelet-plugin", "the plugin's program")
	flag.IntVar(&o.mostDynamic, "most-dynamic", 50, "largest number of nodes of the layout "+dynamic)
	flag.IntVar(&o.claims, "claims", 100, "number of claims in one measurement")
	flag.IntVar(&o.rounds, "rounds", 3, "number of measurements of each layout")
	flag.DurationVar(&o.limit, "limit", 2*time.Minute,
		"time limit of one measurement, which then counts as it is; larger sizes are skipped")
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
	o.kubernetes = strings.Split(*versions, ",")
	for _, name := range strings.Split(*chosen, ",") {
		i := slices.Index(names, name)
		if i < 0 {
			return o, fmt.Errorf("--layouts: there is none called %q", name)
		}
		o.layouts = append(o.layouts, layouts[i])
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
	s := &scale{options: o, costs: map[key]*costs{}}
	for _, s.version = range o.kubernetes {
		if err = s.onCluster(ctx); err != nil {
			break // print what was measured so far
		}
	}
	return errors.Join(err, s.print())
}

// onCluster starts a cluster with version s.version of Kubernetes and measures there.
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
	c, err := cluster.Up(ctx, cluster.Options{
		Name: name, ControlPlaneOnly: true, Kubernetes: s.version, ReleaseDefaults: true, Output: os.Stderr,
	})
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
	r := s.conclude()
	if err := r.Table(os.Stdout); err != nil {
		return err
	}
	if s.json != "" {
		f, err := os.Create(s.json)
		if err != nil {
			return err
		}
		if err := errors.Join(r.JSON(f), f.Close()); err != nil {
			return err
		}
	}
	for _, g := range r.Goals {
		if !g.Met() {
			return errors.New("a goal is not met")
		}
	}
	return nil
}

// key identifies a measurement by the version of Kubernetes, the layout, the number of nodes and
// the kind of claim.
type key struct {
	kubernetes, layout, claim string
	nodes                     int
}

// costs has the time per claim in each round of one measurement.
type costs struct {
	// elapsed is the time that passed per claim. It depends on all programs on the machine. processor
	// is the processor time of the scheduler per claim.
	elapsed, processor report.Samples
}

// leastRate is the lowest permitted rate of allocations in a layout with limited set. It is
// relative to the rate in the layout "whole", in which nodes publish only whole GPUs.
const leastRate = 0.8

// conclude compares every layout with the layout "whole" at the same number of nodes, and returns
// the rows and goals.
func (s *scale) conclude() *report.Report {
	r := &report.Report{Machine: s.machine()}
	for _, version := range s.kubernetes {
		for _, size := range s.nodes {
			var elapsed, processor *report.Row // rows of the layout whole
			for _, l := range s.layouts {
				for _, c := range l.claims {
					cost := s.costs[key{version, l.name, c.name, size}]
					if cost == nil {
						continue
					}
					work, by := fmt.Sprintf("%s, %d nodes", c.name, size), version+", "+l.name
					time := r.Add(work, by, &cost.elapsed)
					cpu := r.Add(work+": the scheduler's processor", by, &cost.processor)
					if l.name == whole {
						elapsed, processor = time, cpu
						continue
					}
					if elapsed == nil || c.class != wholeClass {
						continue
					}
					time.Compare(elapsed)
					cpu.Compare(processor)
					if l.limited && ownNodesOnly(version) {
						r.AtLeast("claims a second, "+work+", to "+whole, by, elapsed.P50/time.P50, leastRate, "×")
					}
				}
			}
		}
	}
	return r
}

// ownNodesOnly reports whether the scheduler of a Kubernetes version reads only each node's own
// counters. Up to 1.36 the scheduler reads all nodes' counters for each node, so leastRate does not
// apply (https://github.com/kubernetes/kubernetes/pull/138917).
func ownNodesOnly(version string) bool {
	minor, _, _ := strings.Cut(strings.TrimPrefix(version, "v1."), ".")
	n, err := strconv.Atoi(minor)
	return err == nil && n >= 37
}

func (s *scale) machine() string {
	return fmt.Sprintf("%d claims at once, medians of %d rounds", s.claims, s.rounds)
}

type scale struct {
	options

	costs map[key]*costs

	// version and client belong to the cluster that is being measured.
	version string
	client  kubernetes.Interface
	// schedulerConfig is the client configuration for the scheduler's own port.
	schedulerConfig *rest.Config
	// published has the slices of one node, by the MIG policy of its plugin.
	published map[string]model
	// generation counts the measured layouts, including the current one. Node names contain it.
	generation int
}
