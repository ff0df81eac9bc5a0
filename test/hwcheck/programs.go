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

// The programs that a check may run. Besides them run only what a CDI spec names as hooks, which do not meet the driver.
const (
	plugin      = "gpu-kubelet-plugin"
	conformance = "conformance.test"
	runc        = "runc"
	hook        = "nvidia-cdi-hook" // run by runc alone, as the spec says
	nvidiaSMI   = "nvidia-smi"      // the machine's own
)

// smiArguments are the ways in which nvidia-smi may be called: each of them only lists.
var smiArguments = [][]string{nil, {"-L"}}

// permit is the closed list: nothing else is ever started.
func permit(program string, args []string) error {
	ok := false
	switch program {
	case plugin:
		ok = len(args) > 0 && (args[0] == "inventory" || args[0] == "version" && len(args) == 1)
	case conformance:
		ok = len(args) > 1 && args[0] == "-lib" && args[1] != "" // with -lib it runs its reading half, whatever else is asked of it
	case runc:
		ok = slices.Contains(args, "run") != slices.Contains(args, "delete")
	case nvidiaSMI:
		ok = slices.ContainsFunc(smiArguments, func(known []string) bool { return slices.Equal(known, args) })
	}
	if !ok {
		return fmt.Errorf("%s %s: not among what this check may run", program, strings.Join(args, " "))
	}
	return nil
}

// programs are those that came with hwcheck, unpacked.
type programs struct {
	self string
	dir  string
}

// unpack makes the programs ready in dir. They are stored compressed: the plugin alone would fill most of what the folder may weigh.
func unpack(self, dir string) (programs, error) {
	packed := filepath.Join(filepath.Dir(self), "programs")
	for _, name := range []string{plugin, conformance, runc, hook} {
		if err := unpackFile(filepath.Join(packed, name+".gz"), filepath.Join(dir, name)); err != nil {
			return programs{}, fmt.Errorf("unpack %s (the folder of hwcheck must be whole): %w", name, err)
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
}

// said is the program's own words about its end, for a report.
func (o outcome) said() string {
	text := strings.TrimSpace(o.stderr)
	if text == "" {
		text = strings.TrimSpace(o.stdout)
	}
	if o.err != nil {
		text = strings.TrimSpace(text + " (" + o.err.Error() + ")")
	}
	return text
}

// runLimit bounds each program: a hanging GPU must not hang the check.
const runLimit = 3 * time.Minute

// run runs one of our programs. All but runc, which cannot make a container otherwise, run without capabilities.
func (p programs) run(ctx context.Context, name string, args ...string) outcome {
	if err := permit(name, args); err != nil {
		return outcome{err: err}
	}
	argv := append([]string{p.path(name)}, args...)
	if name != runc {
		argv = append([]string{p.self, stageWithoutCapabilities}, argv...)
	}
	return start(ctx, command{argv: argv})
}

// command is a process to start. The environment is a new one: what the caller's names (libraries, visible devices) must not decide what is found.
type command struct {
	argv []string
	env  []string
	prep func(*exec.Cmd)
}

func start(ctx context.Context, c command) outcome {
	ctx, cancel := context.WithTimeoutCause(ctx, runLimit, fmt.Errorf("it has not ended for %s", runLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, c.argv[0], c.argv[1:]...) //nolint:gosec // permitted before
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TMPDIR=" + os.TempDir()}, c.env...)
	// Asked to end, runc finishes making the container and passes the request on; killed, it would leave a cgroup that it knows nothing of.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	if c.prep != nil {
		c.prep(cmd)
	}
	err := cmd.Run()
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx))
	}
	return outcome{stdout: stdout.String(), stderr: stderr.String(), err: err}
}
