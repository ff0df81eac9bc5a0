// bench measures what the plugin costs: the production program on a simulated GPU node, called over its socket as the kubelet does, with a real API server.
// In the same run it measures the floor, which is what safety alone would cost on the same disk and with the same API server. Each figure is a ratio
// of two that were taken in turns, so that it says something on a busy machine too.
//
// With several programs it measures all of them, in turns.
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

// options are the command line's.
type options struct {
	programs []string
	only     *regexp.Regexp
	// samples is how often short work is done; the rest follows from it.
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
		// The machine is left as it was found, whatever ended this.
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
	programs := flag.String("programs", "build/bin/gpu-kubelet-plugin", "the plugin's program; several, separated by commas, are measured in turns; NAME=PATH names one")
	only := flag.String("only", "", "regular expression: which of the measurements "+strings.Join(names(), ", ")+" are made; empty means all")
	flag.IntVar(&o.samples, "samples", 400, "how often work of a few milliseconds is done")
	flag.BoolVar(&o.quick, "quick", false, "everything once, in seconds: to see that it works. What does not depend on time is held to its limits")
	flag.BoolVar(&o.hold, "hold", false, "measure nothing: leave everything up for a profiler, until interrupted")
	flag.StringVar(&o.folder, "folder", os.TempDir(), "where the nodes' files and the plugin's records lie: a short path on the disk that is meant")
	flag.StringVar(&o.memory, "memory", "/dev/shm", "where CDI specs and logs lie: a tmpfs, as /run is on a node")
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

// path and title take NAME=PATH apart.
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
