// gpu-kubelet-plugin is the DRA kubelet plugin for NVIDIA GPUs. Without a subcommand it serves the
// GPUs of its node. Subcommand "inventory" prints the devices that the plugin would offer,
// "uninstall" removes the plugin's DaemonSet, and "version" prints the version.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/bind"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/watch"
)

// version is the program's version, which the linker sets.
var version = "devel"

// exitUsage is the exit code for wrong usage, exitFailed for every other failure.
const (
	exitFailed = 1
	exitUsage  = 2
)

type command struct {
	summary string
	run     func(ctx context.Context, args []string, out io.Writer) error
}

func commands() map[string]command {
	return map[string]command{
		"":                 {"serve this node (the default)", serve},
		"inventory":        {"show what this node would offer, or why nothing; needs no cluster and changes nothing", runInventory},
		"uninstall":        {"remove the DaemonSet in order; refuses while claims hold devices", runUninstall},
		driver.ScanCommand: {"scan the hardware for a parent process (internal)", runScan},
		cut.Command:        {"change MIG partitions for a parent process (internal)", runPartition},
		bind.Command:       {"bind GPUs to VFIO for a parent process (internal)", runBind},
		watch.Command:      {"watch the hardware for a parent process (internal)", runWatch},
		"version": {"print the version", func(_ context.Context, _ []string, out io.Writer) error {
			_, err := fmt.Fprintln(out, version)
			return err
		}},
	}
}

func main() {
	// The first signal cancels ctx, so that the process ends cleanly. A second signal ends it at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	klog.Flush()
	os.Exit(code)
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	name := ""
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		name, args = args[0], args[1:]
	}
	c, ok := commands()[name]
	if !ok {
		fmt.Fprintf(errOut, "gpu-kubelet-plugin: unknown command %q; the commands are:\n", name)
		for _, n := range []string{"inventory", "uninstall", "version"} {
			fmt.Fprintf(errOut, "  %-10s %s\n", n, commands()[n].summary)
		}
		return exitUsage
	}
	err := c.run(ctx, args, out)
	var usage usageError
	switch {
	case err == nil, errors.Is(err, config.ErrHelp):
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(errOut, "gpu-kubelet-plugin: %v\n", err)
		return exitUsage
	}
	fmt.Fprintf(errOut, "gpu-kubelet-plugin: %v\n", err)
	return exitFailed
}

// usageError is an error in the command line, the environment or the configuration file.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// startLogging sets up klog for this process, as configured.
func startLogging(cfg *config.Config) error {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Set("v", strconv.Itoa(cfg.Verbosity)); err != nil {
		return fmt.Errorf("set the verbosity of the log: %w", err)
	}
	if cfg.LoggingFormat == "json" {
		handler := slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{
			AddSource: true, Level: slog.Level(-cfg.Verbosity), ReplaceAttr: readableDuration,
		})
		klog.SetLoggerWithOptions(logr.FromSlogHandler(handler), klog.ContextualLogger(true))
	}
	slog.SetDefault(slog.New(logr.ToSlogHandler(klog.Background()))) // for libraries, also those that use package log
	return nil
}

// readableDuration writes a duration as text with its unit, as klog does.
func readableDuration(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}
