// gpu-mps runs as the MPS supervisor of a node, in a DaemonSet of its own (supervise). It is also
// the OCI hook that limits the GPU memory of a container (memory-limit). It is a static program,
// because the container runtime runs hooks on hosts of any kind. It does not use the API server.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/memorylimit"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/supervisor"
)

// version is the program's version, which the linker sets.
var version = "devel"

// exitUsage is the exit code for wrong usage, exitFailed for every other failure.
const (
	exitFailed = 1
	exitUsage  = 2
)

// statusTimeout is how long the request for the daemons' status may take. The supervisor has the
// status in memory, so it answers at once.
const statusTimeout = 5 * time.Second

type command struct {
	name, summary string
	run           func(ctx context.Context, args []string) error
}

func commands() []command {
	return []command{
		{"supervise", "start, supervise and stop the node's MPS control daemons", supervise},
		{"status", "list the daemons of the node's supervisor; fails if it does not answer", status},
		{mps.LimitCommand, "limit a container to a part of a GPU's memory (run by the container runtime)", memoryLimit},
		{"daemon", "run a program of the driver in its own mount namespace (internal)", daemon},
		{"version", "print the version", func(context.Context, []string) error {
			_, err := fmt.Fprintln(os.Stdout, version)
			return err
		}},
	}
}

// usageError is an error in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// init keeps main on the first thread. Only that one has the parent-death signal, which an MPS
// daemon must inherit from [daemon].
func init() { runtime.LockOSThread() }

func main() {
	// The first signal cancels ctx, so that the process ends cleanly. A second signal ends it at once.
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
	fmt.Fprintf(os.Stderr, "gpu-mps: unknown command %q; the commands are:\n", name)
	for _, c := range commands() {
		fmt.Fprintf(os.Stderr, "  %-10s %s\n", c.name, c.summary)
	}
	return exitUsage
}

// parse parses the flags in args, and refuses arguments that are not flags.
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
		return fmt.Errorf("find the path of gpu-mps: %w", err)
	}
	o := supervisor.Options{Program: program}
	flags := newFlags("supervise")
	flags.StringVar(&o.Paths.PluginDir, "plugin-dir", defaultPluginDir,
		"the plugin's directory below the kubelet's root, at the same path on the host")
	flags.StringVar(&o.DriverRoot, "driver-root", "/", "root of the NVIDIA driver's files as the host sees it")
	flags.StringVar(&o.DriverRootMount, "driver-root-mount", "", "the driver root as this process sees it; empty means the same path")
	flags.StringVar(&o.DevRoot, "dev-root", "", "directory whose dev/ holds the NVIDIA device nodes, as this process sees it; "+
		"empty means / if it has dev/nvidiactl, else the driver root")
	flags.StringVar(&o.SELinuxLabel, "selinux-label", "", "label of the directories that daemons share with containers, such as "+
		"system_u:object_r:container_file_t:s0; empty means none")
	flags.Uint64Var(&o.SharedMemory, "shared-memory", 0, "size of /dev/shm of each daemon and its clients in MiB; 0 means half "+
		"of the node's memory")
	flags.DurationVar(&o.StartTimeout, "start-timeout", supervisor.DefaultStartTimeout,
		"time limit for a daemon to become ready; the kubelet waits 45s for the claim")
	verbosity := flags.Uint("v", 2, "log verbosity: 0 tells an operator what changed, 4 tells a developer how")
	if err := parse(flags, args); err != nil {
		return err
	}
	if o.StartTimeout <= 0 {
		return usageError{fmt.Errorf("--start-timeout: %s: want more than 0", o.StartTimeout)}
	}
	if o.DriverRoot == "" {
		return usageError{errors.New("--driver-root is empty: want / or the directory of the driver's files")}
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
	flags.IntVar(&l.Minor, "minor", -1, "the N of the GPU's device node /dev/nvidiaN")
	flags.Uint64Var(&l.Mebibytes, "mebibytes", 0, "memory that the container may use, in MiB")
	flags.StringVar(&l.DriverRoot, "driver-root", "/", "root of the NVIDIA driver's files as the host sees it")
	flags.StringVar(&l.Cgroups, "cgroup-root", "/sys/fs/cgroup", "where the host has mounted cgroup v2")
	if err := parse(flags, args); err != nil {
		return err
	}
	if l.GPU == "" || l.Minor < 0 || l.Mebibytes == 0 {
		return usageError{errors.New("--gpu, --minor and --mebibytes are all needed")}
	}
	return l.Hook(ctx, os.Stdin)
}

// daemon becomes a program of the NVIDIA driver in a mount namespace of its own. Only the
// supervisor calls this command. args[0] is the view as JSON, and the rest are the program's
// arguments.
func daemon(_ context.Context, args []string) error {
	if len(args) == 0 {
		return usageError{errors.New("the argument with the view is missing")}
	}
	view, err := namespace.Parse(args[0])
	if err != nil {
		return usageError{err}
	}
	return namespace.Exec(view, args[1:], os.Environ())
}
