// bench measures the cost of the plugin: the production program on a simulated GPU node, called
// over its socket as by the kubelet, with a real API server.
//
// In the same run it measures the "floor", a minimal safe Prepare on the same disk with the same
// API server. Each figure is a ratio of two measurements that alternate, so it is meaningful on a
// busy machine too. If several versions of the plugin are given, bench alternates between them as
// well.
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
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// options are the values of the command-line flags.
type options struct {
	programs []string
	only     *regexp.Regexp
	// samples is the number of samples of short work. The numbers of samples of longer work are
	// fractions of it.
	samples int
	quick   bool
	hold    bool
	folder  string
	memory  string
	json    string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	o, err := parse()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("this needs root, for device nodes and for the control plane's namespaces")
	}
	klog.LogToStderr(false)
	klog.SetOutput(os.Stderr)
	b, err := begin(ctx, o)
	if err == nil {
		err = b.measure(ctx)
	}
	if b != nil {
		// Clean up even after an interrupt, which has ended ctx.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, b.end(end))
	}
	if err != nil {
		return err
	}
	return b.print()
}

func parse() (options, error) {
	var o options
	programs := flag.String("programs", "build/bin/gpu-kubelet-plugin",
		"comma-separated programs of the plugin, measured alternately; NAME=PATH names one")
	only := flag.String("only", "", "regular expression that selects among the measurements "+strings.Join(names(), ", ")+"; empty means all")
	flag.IntVar(&o.samples, "samples", 400, "number of samples of work that takes a few milliseconds")
	flag.BoolVar(&o.quick, "quick", false, "run everything once, in seconds, and check only limits that do not depend on time")
	flag.BoolVar(&o.hold, "hold", false, "measure nothing, and keep everything running for a profiler until interrupted")
	flag.StringVar(&o.folder, "folder", os.TempDir(),
		"folder for the nodes' files and the plugin's records: a short path on the disk to measure")
	flag.StringVar(&o.memory, "memory", "/dev/shm", "folder for CDI specs and logs: a tmpfs, like /run on a node")
	flag.StringVar(&o.json, "json", "", "file for the figures as JSON")
	flag.Parse()
	if o.quick {
		o.samples = 20
	}
	o.programs = strings.Split(*programs, ",")
	for _, p := range o.programs {
		if _, err := os.Stat(path(p)); err != nil {
			return o, fmt.Errorf("--programs: %w (make build makes it)", err)
		}
	}
	var err error
	o.only, err = regexp.Compile(*only)
	return o, err
}

// path returns the path in the text program, which is NAME=PATH. title returns the name.
func path(program string) string {
	if _, p, ok := strings.Cut(program, "="); ok {
		return p
	}
	return program
}

func title(program string) string {
	if name, _, ok := strings.Cut(program, "="); ok {
		return name
	}
	return filepath.Base(program)
}
