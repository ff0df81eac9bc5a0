package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// These are the programs that hwcheck may run. In addition runc runs the hooks of a CDI spec, which
// do not use the driver.
const (
	plugin      = "gpu-kubelet-plugin"
	conformance = "conformance.test"
	runc        = "runc"
	hook        = "nvidia-cdi-hook" // only runc runs it, as the CDI spec says
	nvidiaSMI   = "nvidia-smi"      // installed on the machine
	cudaCheck   = "cudacheck"       // our own CUDA program
	passthrough = "passthrough"     // reads sysfs only
	itself      = "hwcheck"         // in a container, describes files
	nvidiaCTK   = "nvidia-ctk"      // of the machine, if a flag names it
)

// smiArguments are the permitted argument lists of nvidia-smi. None of them changes anything.
var smiArguments = [][]string{nil, {"-L"}, timeSliceArguments}

// timeSliceArguments make nvidia-smi list the time-slices. The plugin reads this table.
var timeSliceArguments = []string{"compute-policy", "--list"}

// checkPermitted returns an error unless hwcheck may run the program with these arguments.
func checkPermitted(program string, args []string) error {
	ok := false
	switch program {
	case plugin:
		ok = len(args) > 0 && (args[0] == "inventory" || len(args) == 1 && (args[0] == "version" || args[0] == "watch"))
	case conformance:
		// With -lib, the conformance suite runs only the tests that read, whatever its other arguments
		// are.
		ok = len(args) > 1 && args[0] == "-lib" && args[1] != ""
	case runc:
		ok = slices.Contains(args, "run") != slices.Contains(args, "delete")
	case passthrough:
		ok = len(args) > 0
	case cudaCheck:
		ok = len(args) == 0 || len(args) == 1 && slices.Contains(cudaArguments, args[0])
	case itself:
		ok = len(args) > 1 && args[0] == stageLook && len(without(args[1:], looked)) == 0
	case nvidiaCTK:
		ok = len(args) > 2 && args[0] == "cdi" && args[1] == "generate" && !slices.ContainsFunc(args, func(arg string) bool {
			return strings.HasPrefix(arg, "--output") // it would write a file
		})
	case nvidiaSMI:
		ok = slices.ContainsFunc(smiArguments, func(known []string) bool { return slices.Equal(known, args) })
	}
	if !ok {
		return fmt.Errorf("%s %s: not among the programs and arguments that hwcheck may run", program, strings.Join(args, " "))
	}
	return nil
}

// programs are the unpacked programs that come with hwcheck. self is the path of hwcheck, and dir
// the folder of the others.
type programs struct {
	self string
	dir  string
}

// unpack unpacks the programs to dir. The folder of hwcheck contains them compressed, to be small.
func unpack(self, dir string) (programs, error) {
	packed := filepath.Join(filepath.Dir(self), "programs")
	for _, name := range []string{plugin, conformance, runc, hook, cudaCheck, passthrough} {
		if err := unpackFile(filepath.Join(packed, name+".gz"), filepath.Join(dir, name)); err != nil {
			return programs{}, fmt.Errorf("unpack %s (the folder of hwcheck must be complete): %w", name, err)
		}
	}
	return programs{self: self, dir: dir}, nil
}

func unpackFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	unzipped, err := gzip.NewReader(in)
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755) //nolint:gosec // a program
	if err != nil {
		return err
	}
	_, err = io.Copy(out, unzipped) //nolint:gosec // our own archive
	return errors.Join(err, out.Close())
}

func (p programs) path(name string) string { return filepath.Join(p.dir, name) }

// outcome is what a program printed and how it ended.
type outcome struct {
	stdout, stderr string
	err            error
	// started says that there was a process, whatever became of it.
	started bool
}

// summary describes for a report what the program printed and how it ended.
func (o outcome) summary() string {
	text := strings.TrimSpace(o.stderr)
	if text == "" {
		text = strings.TrimSpace(o.stdout)
	}
	if o.err != nil {
		text = strings.TrimSpace(text + " (" + o.err.Error() + ")")
	}
	return text
}

// runLimit limits the time of each program, so that a hanging GPU does not make hwcheck hang.
const runLimit = 3 * time.Minute

// run runs the named program without capabilities. Only runc keeps its capabilities, which it needs
// to create containers.
func (p programs) run(ctx context.Context, name string, args ...string) outcome {
	if err := checkPermitted(name, args); err != nil {
		return outcome{err: err}
	}
	argv := append([]string{p.path(name)}, args...)
	if name != runc {
		argv = append([]string{p.self, stageWithoutCapabilities}, argv...)
	}
	return start(ctx, command{argv: argv})
}

// command is a process to start. It does not inherit the caller's environment, because variables
// such as library paths and visible devices would affect the result.
type command struct {
	argv []string
	env  []string
	prep func(*exec.Cmd)
}

func start(ctx context.Context, c command) outcome {
	ctx, cancel := context.WithTimeoutCause(ctx, runLimit, fmt.Errorf("the program has not ended within %s", runLimit))
	defer cancel()
	cmd := c.build(ctx)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	return outcome{stdout: stdout.String(), stderr: stderr.String(), err: err, started: cmd.Process != nil}
}

// build returns the process to start. It ends with ctx.
func (c command) build(ctx context.Context) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.argv[0], c.argv[1:]...) //nolint:gosec // permitted before
	cmd.Env = append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TMPDIR=" + os.TempDir(),
	}, c.env...)
	// On SIGTERM, runc finishes creating the container and forwards the signal. If killed, it would
	// leave a cgroup behind.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	if c.prep != nil {
		c.prep(cmd)
	}
	return cmd
}
