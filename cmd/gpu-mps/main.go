// gpu-mps hosts the MPS control daemons of a node, in a DaemonSet of its own (supervise), and is
// the hook that holds containers to a part of a GPU's memory (memory-limit). It is one static
// program, because hooks run on hosts of any kind. It speaks to no API server.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/memorylimit"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor"
)

// version is set by the linker.
var version = "devel"

// Exit codes: a wrong call is told apart from work that failed.
const (
	exitFailed = 1
	exitUsage  = 2
)

// statusTimeout is for a question that is answered from memory.
const statusTimeout = 5 * time.Second

type command struct {
	name, summary string
	run           func(ctx context.Context, args []string) error
}

func commands() []command {
	return []command{
		{"supervise", "start, keep and end the node's MPS control daemons", supervise},
		{"status", "list the daemons of the node's supervisor; fails if it does not answer", status},
		{mps.LimitCommand, "hold a container to a part of a GPU's memory (run by the container runtime)", memoryLimit},
		{"daemon", "become a program of the driver's in a mount namespace of its own (internal)", daemon},
		{"version", "print the version", func(context.Context, []string) error {
			_, err := fmt.Fprintln(os.Stdout, version)
			return err
		}},
	}
}

// usageError is a call that cannot work.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func main() {
	// A signal ends the context; a second one ends the process, for whoever is in a hurry.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:])
	klog.Flush()
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	name := ""
	if len(args) > 0 {
		name, args = args[0], args[1:]
	}
	for _, c := range commands() {
		if c.name != name {
			continue
		}
		err := c.run(ctx, args)
		if err == nil || errors.Is(err, flag.ErrHelp) {
			return 0
		}
		fmt.Fprintf(os.Stderr, "gpu-mps %s: %v\n", name, err)
		if wrong := new(usageError); errors.As(err, wrong) {
			return exitUsage
		}
		return exitFailed
	}
	fmt.Fprintf(os.Stderr, "gpu-mps: unknown command %q; there are:\n", name)
	for _, c := range commands() {
		fmt.Fprintf(os.Stderr, "  %-10s %s\n", c.name, c.summary)
	}
	return exitUsage
}

// parse takes flags alone.
func parse(flags *flag.FlagSet, args []string) error {
	err := flags.Parse(args)
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		return usageError{err}
	}
	return err
}

func newFlags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet("gpu-mps "+name, flag.ContinueOnError)
	flags.SetOutput(os.Stderr)
	return flags
}

const defaultPluginDir = "/var/lib/kubelet/plugins/gpu.nvidia.com"

func supervise(ctx context.Context, args []string) error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program itself: %w", err)
	}
	o := supervisor.Options{Program: program}
	flags := newFlags("supervise")
	flags.StringVar(&o.Paths.PluginDir, "plugin-dir", defaultPluginDir, "the plugin's directory below the kubelet's root, at the same path on the host")
	flags.StringVar(&o.Paths.ShmRoot, "shm-root", "/dev/shm", "the host's file system for shared memory, as the host sees it")
	flags.StringVar(&o.ShmRootMount, "shm-root-mount", "", "the same as this process sees it; empty means the same path")
	flags.StringVar(&o.DriverRoot, "driver-root", "/", "root of the NVIDIA driver's files as the host sees it")
	flags.StringVar(&o.DriverRootMount, "driver-root-mount", "", "the same as this process sees it; empty means the same path")
	flags.StringVar(&o.DevRoot, "dev-root", "", "directory whose dev/ holds the NVIDIA device nodes, as this process sees it; empty means / if it has dev/nvidiactl, else the driver root")
	flags.StringVar(&o.SELinuxLabel, "selinux-label", "", "label of the directories that daemons share with containers, such as system_u:object_r:container_file_t:s0; empty means none")
	flags.Uint64Var(&o.SharedMemory, "shared-memory", 0, "MiB that each daemon and its clients have for /dev/shm; 0 means half of the node's memory")
	flags.DurationVar(&o.StartTimeout, "start-timeout", supervisor.DefaultStartTimeout, "how long a daemon may take until it is ready; the kubelet waits 45s for the claim")
	verbosity := flags.Uint("v", 2, "log verbosity: 0 tells an operator what changed, 4 tells a developer how")
	if err := parse(flags, args); err != nil {
		return err
	}
	var logging flag.FlagSet
	klog.InitFlags(&logging)
	if err := logging.Set("v", fmt.Sprint(*verbosity)); err != nil {
		return usageError{err}
	}
	klog.FromContext(ctx).Info("Starting gpu-mps", "version", version)
	return supervisor.Run(ctx, o)
}

func status(ctx context.Context, args []string) error {
	flags := newFlags("status")
	pluginDir := flags.String("plugin-dir", defaultPluginDir, "the plugin's directory below the kubelet's root")
	if err := parse(flags, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	all, err := mps.NewClient(mps.Paths{PluginDir: *pluginDir}).List(ctx)
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	return out.Encode(all)
}

func memoryLimit(ctx context.Context, args []string) error {
	var l memorylimit.Limit
	flags := newFlags(mps.LimitCommand)
	flags.StringVar(&l.GPU, "gpu", "", "UUID of the GPU")
	flags.Uint64Var(&l.Mebibytes, "mebibytes", 0, "how much of its memory the container may use")
	flags.StringVar(&l.DriverRoot, "driver-root", "/", "root of the NVIDIA driver's files as the host sees it")
	flags.StringVar(&l.Cgroups, "cgroup-root", "/sys/fs/cgroup", "where the host has mounted cgroup v2")
	if err := parse(flags, args); err != nil {
		return err
	}
	if l.GPU == "" || l.Mebibytes == 0 {
		return usageError{errors.New("--gpu and --mebibytes are both needed")}
	}
	return l.Hook(ctx, os.Stdin)
}

// daemon is called by the supervisor alone: the view, then the program's arguments.
func daemon(_ context.Context, args []string) error {
	if len(args) == 0 {
		return usageError{errors.New("the view is missing")}
	}
	view, err := namespace.Parse(args[0])
	if err != nil {
		return usageError{err}
	}
	return namespace.Exec(view, args[1:], os.Environ())
}
