// gpu-kubelet-plugin is the DRA kubelet plugin for NVIDIA GPUs. Without a subcommand it serves the node it runs on; the subcommands look at a node
// ("inventory"), take an installation away in order ("uninstall") or name the build ("version").
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format json
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// version is set by the linker.
var version = "devel"

// Exit codes: a wrong call is told apart from work that failed.
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
		"":                      {"serve this node (the default)", serve},
		"inventory":             {"show what this node would offer, and why not if it offers nothing; needs no cluster and changes nothing", runInventory},
		"uninstall":             {"remove the DaemonSet in order; refuses while claims hold devices", uninstall},
		driver.ScanCommand:      {"look at the hardware for a parent process (internal)", runScan},
		nvidia.PartitionCommand: {"cut a GPU for a parent process (internal)", runPartition},
		nvidia.WatchCommand:     {"listen to the hardware for a parent process (internal)", runWatch},
		"version": {"print the version", func(_ context.Context, _ []string, out io.Writer) error {
			_, err := fmt.Fprintln(out, version)
			return err
		}},
	}
}

func main() {
	// A signal ends the context; a second one ends the process, for whoever is in a hurry.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	logs.FlushLogs()
	os.Exit(code)
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	name := ""
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		name, args = args[0], args[1:]
	}
	c, ok := commands()[name]
	if !ok {
		fmt.Fprintf(errOut, "gpu-kubelet-plugin: unknown command %q; there are:\n", name)
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

// usageError is a call or configuration that cannot work, whatever the node looks like.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// startLogging sets up klog as configured; it can be done once per process.
func startLogging(cfg *config.Config) error {
	c := logsapi.NewLoggingConfiguration()
	c.Format = cfg.LoggingFormat
	c.Verbosity = logsapi.VerbosityLevel(uint32(cfg.Verbosity)) //nolint:gosec // validated to be between 0 and 10
	if err := logsapi.ValidateAndApply(c, nil); err != nil {
		return usageError{fmt.Errorf("--logging-format: %w", err)}
	}
	klog.EnableContextualLogging(true)
	return nil
}
