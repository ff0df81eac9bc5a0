package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/node"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/bench/report"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const gpus = 8

// bench is a run of the benchmark.
type bench struct {
	options

	cluster string
	folder  string
	memory  string
	config  string
	client  kubernetes.Interface
	floor   *floor
	// subjects are the measured versions of the plugin, each on its own node.
	subjects []*subject
	report   report.Report
}

// subject is one measured version of the plugin, running on its own node.
type subject struct {
	*node.Plugin

	title  string
	node   *node.Node
	claims []*resourceapi.ResourceClaim // one for each whole GPU
}

// begin starts the control plane and the plugins. The caller must call end on the result, even if
// begin returned an error.
func begin(ctx context.Context, o options) (*bench, error) {
	b := &bench{options: o, cluster: fmt.Sprintf("bench%d", os.Getpid()%1000000)}
	c, err := cluster.Up(ctx, cluster.Options{Name: b.cluster, ControlPlaneOnly: true, Output: os.Stderr})
	if err != nil {
		return b, err
	}
	b.config = c.Kubeconfig()
	if b.client, err = clientFor(c); err != nil {
		return b, err
	}
	if b.folder, err = os.MkdirTemp(o.folder, "bench-"); err != nil {
		return b, err
	}
	if b.memory, err = os.MkdirTemp(o.memory, "bench-"); err != nil {
		return b, err
	}
	if err := b.prepareNamespace(ctx); err != nil {
		return b, err
	}
	for i, p := range o.programs {
		if err := b.subject(ctx, fmt.Sprintf("node-%d", i), title(p), path(p)); err != nil {
			return b, err
		}
	}
	b.floor, err = b.newFloor(ctx)
	return b, err
}

func (b *bench) newNode(ctx context.Context, name, program string, gpus int) (*node.Node, error) {
	program, err := filepath.Abs(program)
	if err != nil {
		return nil, err
	}
	return node.New(ctx, node.Options{
		Name: name, Folder: b.folder, CDIRoot: filepath.Join(b.memory, name), Log: filepath.Join(b.memory, "logs", name),
		GPUs: gpus, Binary: program, Kubeconfig: b.config, Client: b.client,
	})
}

func (b *bench) subject(ctx context.Context, name, title, program string) error {
	s := &subject{title: title}
	var err error
	if s.node, err = b.newNode(ctx, name, program, gpus); err != nil {
		return err
	}
	for i, d := range s.node.Devices {
		c, err := b.claim(ctx, s.node, fmt.Sprintf("%s-gpu%d", name, i), d, false)
		if err != nil {
			return err
		}
		s.claims = append(s.claims, c)
	}
	if s.Plugin, err = s.node.Start(ctx); err != nil {
		return err
	}
	b.subjects = append(b.subjects, s)
	return b.published(ctx, s.node)
}

// end stops the plugins, and removes the cluster and all files.
func (b *bench) end(ctx context.Context) error {
	var err error
	for _, s := range b.subjects {
		err = errors.Join(err, s.Stop())
	}
	err = errors.Join(err, cluster.Down(ctx, b.cluster))
	for _, dir := range []string{b.folder, b.memory} {
		if dir != "" {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}
	return err
}

// measurement is one part of the benchmark, such as single or partitions.
type measurement struct {
	name string
	run  func(b *bench, ctx context.Context) error
}

func measurements() []measurement {
	return []measurement{
		{"single", (*bench).single},
		{"repeated", (*bench).repeated},
		{"parallel", (*bench).parallel},
		{"hanging", (*bench).hanging},
		{"partitions", (*bench).partitions},
		{"load", (*bench).load},
		{"start", (*bench).start},
		{"many-claims", (*bench).manyClaims},
		{"footprint", (*bench).footprint},
		{"size", (*bench).size},
	}
}

func names() []string {
	var all []string
	for _, m := range measurements() {
		all = append(all, m.name)
	}
	return all
}

func (b *bench) measure(ctx context.Context) error {
	b.report.Machine = machine()
	if b.hold {
		for _, s := range b.subjects {
			fmt.Fprintf(os.Stderr, "%s: processes %v, files below %s\n", s.title, s.Processes(), s.node.Root)
		}
		<-ctx.Done()
		return nil
	}
	for _, m := range measurements() {
		if !b.only.MatchString(m.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "measuring: %s\n", m.name)
		if err := m.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return nil
}

// machine describes the host and its load for the report.
func machine() string {
	load, _ := os.ReadFile("/proc/loadavg")
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	fields := strings.Fields(string(load))
	return fmt.Sprintf("%d CPUs, Linux %s, load average at the start %s",
		runtime.NumCPU(), strings.TrimSpace(string(kernel)), strings.Join(fields[:min(3, len(fields))], " "))
}

func (b *bench) print() error {
	if err := b.report.Table(os.Stdout); err != nil {
		return err
	}
	if b.json != "" {
		f, err := os.Create(b.json)
		if err == nil {
			err = errors.Join(b.report.JSON(f), f.Close())
		}
		if err != nil {
			return err
		}
	}
	if !b.quick {
		return nil
	}
	// A quick run returns an error for each missed goal that does not depend on time, because such
	// goals must be met on every host.
	var err error
	for _, g := range b.report.Goals {
		if !g.Timed && !g.Met() {
			err = errors.Join(err, fmt.Errorf("%s: %.4g %s, and the limit is %g", g.What, g.Measured, g.Unit, g.Limit))
		}
	}
	return err
}
