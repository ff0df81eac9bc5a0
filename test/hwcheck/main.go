// Hwcheck compares this project's model of NVIDIA GPUs with a machine that has one, and writes a
// report.
//
// It finds the driver, compares NVML's answers with the file of the GPU's model, and runs the
// inventory of the unmodified plugin. It takes the CDI specs that the plugin would write, and runs
// the machine's own nvidia-smi in containers with them. The folder that `make hwcheck` builds needs
// neither Go nor a network.
//
// Hwcheck only reads. It changes no GPU's MIG layout, clocks, power, persistence, compute mode or
// anything else, and resets none. Two measures guarantee that. The programs and their arguments are
// a closed list (programs.go). And every program that uses the driver runs without capabilities
// (capabilities.go), which the kernel driver requires for changes. One exception calls a closed
// list of NVML getters with CAP_SYS_ADMIN (getters.go). Hwcheck creates only temporary files and
// containers, and removes them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// These are the exit codes, for scripts.
const (
	exitAgreed    = 0
	exitDiffered  = 1 // something differs, or failed
	exitUsage     = 2
	exitNoGPU     = 3
	exitNotProven = 4 // nothing differs, but this machine does not allow every check
)

const promise = `This check only reads. It runs gpu-kubelet-plugin inventory and watch, a comparison through NVML,
nvidia-smi without arguments, with -L or compute-policy --list, runc, and a CUDA program of its own that uses 4 KiB of one GPU.
The program also runs as two clients of an MPS daemon in a container made by runc, with 256 MiB each,
or 1.25 GiB each if MPS does not enforce their limit. With less than 3 GiB free it starts no daemon.
It runs in several containers at once too: as clients of one MPS daemon, more and more of them until
MPS refuses one or less than 3 GiB are free, and with memory shared by CUDA IPC.
Every program that uses the driver runs without capabilities, so the driver itself would refuse to
change a GPU. Only a closed list of NVML getters also runs with CAP_SYS_ADMIN. MIG layout, clocks,
power, persistence and compute mode stay as they are, nothing is reset, and the check removes its
temporary folder and containers. It ends within nine minutes, or within --limit.`

type options struct {
	driverRoot string
	devRoot    string
	sysfs      string
	proc       string
	models     string
	out        string
	scans      int
	cuda       bool
	fault      bool
	ctk        string
	limit      time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	if len(args) > 0 {
		// With one of these arguments, hwcheck was started by itself to prepare a child process.
		switch args[0] {
		case stageWithoutCapabilities:
			return report(errOut, execWithoutCapabilities(args[1:]))
		case stageWithSysAdmin:
			return report(errOut, execWithSysAdmin(args[1:]))
		case stageInNamespace:
			return report(errOut, execInNamespace(args[1:]))
		case stageLook:
			for _, path := range args[1:] {
				fmt.Fprint(out, describe(path))
			}
			return exitAgreed
		}
	}
	o, err := parse(args, errOut)
	if errors.Is(err, flag.ErrHelp) {
		return exitAgreed
	}
	if err != nil {
		return exitUsage
	}
	code, err := check(ctx, o, out, errOut)
	if err != nil {
		return report(errOut, err)
	}
	return code
}

func report(errOut io.Writer, err error) int {
	fmt.Fprintln(errOut, "hwcheck:", err)
	return exitDiffered
}

func parse(args []string, errOut io.Writer) (options, error) {
	o := options{}
	flags := flag.NewFlagSet("hwcheck", flag.ContinueOnError)
	flags.SetOutput(errOut)
	flags.Usage = func() {
		fmt.Fprintf(errOut, "usage: hwcheck [flags]\n\n%s\n\n", promise)
		flags.PrintDefaults()
		fmt.Fprint(errOut, "\nexit codes: 0 all agreed, 1 something differed or failed, 2 wrong call, "+
			"3 no GPU here, 4 nothing differed but not everything could be shown\n")
	}
	flags.StringVar(&o.driverRoot, "driver-root", "", "root of the driver's files; empty means to search for it")
	flags.StringVar(&o.devRoot, "dev-root", "",
		"folder whose dev/ holds the device nodes; empty means the driver root if it has dev/nvidiactl, else /")
	flags.StringVar(&o.sysfs, "sysfs-root", "/sys", "where sysfs is mounted")
	flags.StringVar(&o.proc, "proc-root", "/proc", "where procfs is mounted")
	flags.StringVar(&o.models, "models", "", "folder of GPU model files; empty means those that came with this program")
	flags.StringVar(&o.out, "out", "hwcheck-report", "folder for report.md and facts.json, created if missing")
	flags.IntVar(&o.scans, "scans", 100, "how often to scan the GPUs in search of a leak, at least 1")
	flags.BoolVar(&o.cuda, "cuda", true, "run a CUDA program on one GPU, alone and as MPS clients; "+
		"for seconds it takes the memory of its contexts and 512 MiB, or 2.5 GiB if MPS does not enforce its memory limit; "+
		"at most 72 clients run at once, and none is added with less than 3 GiB free; "+
		"no MPS daemon is started without runc or with less than 3 GiB free")
	flags.BoolVar(&o.fault, "fault", false, "let an MPS client write outside its memory, to see what its neighbour notices; "+
		"the kernel's log gets an XID 31")
	flags.StringVar(&o.ctk, "nvidia-ctk", "", "path of NVIDIA's nvidia-ctk, to compare its CDI specification with the plugin's; "+
		"empty means not to compare")
	flags.DurationVar(&o.limit, "limit", 9*time.Minute, "time after which the check ends with what it has; more than 30s")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	for _, path := range []*string{&o.driverRoot, &o.devRoot, &o.sysfs, &o.proc, &o.models, &o.ctk} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return o, err
		}
		*path = absolute
	}
	if o.scans < 1 {
		err := fmt.Errorf("--scans=%d: want at least 1", o.scans)
		fmt.Fprintln(errOut, "hwcheck:", err)
		return o, err
	}
	if o.limit <= endReserve {
		err := fmt.Errorf("--limit=%s: want more than %s", o.limit, endReserve)
		fmt.Fprintln(errOut, "hwcheck:", err)
		return o, err
	}
	if flags.NArg() > 0 {
		err := fmt.Errorf("unexpected argument %q", flags.Arg(0))
		fmt.Fprintln(errOut, "hwcheck:", err)
		return o, err
	}
	return o, nil
}
