// Package tool runs the driver's programs, such as nvidia-smi. No program outlives or blocks this
// process, and it may see only some of the GPUs.
//
// The package needs no C library and imports little, because gpu-mps, a small static program, uses
// it.
package tool

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/tail"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// SMILimit is how long nvidia-smi may take. It wakes each GPU that has persistence mode off,
	// which takes one or two seconds, and a node may have sixteen GPUs. It is far below the two
	// minutes that the kubelet allows for the creation of a container.
	SMILimit = 40 * time.Second
	// keptOutput is how many bytes of a tool's output are kept: the last ones.
	keptOutput = 64 << 10
	// shownOutput is how many bytes of the kept output an error message shows.
	shownOutput = 300
)

// Tool is a program of the driver with the settings of one run.
type Tool struct {
	Program driverroot.Program
	Args    []string
	Limit   time.Duration
	// Hidden are the device nodes of GPUs that the program should not open. If hiding them fails, it
	// opens them.
	Hidden []string
	// Lock is a locked file that the program inherits. If the program is killed but hangs in the
	// driver, the lock stays until the program ends. Lock may be nil.
	Lock *os.File
}

// Run runs the tool and returns its output, even if it failed. When ctx ends or t.Limit passes, Run
// kills the tool and its children.
func (t Tool) Run(ctx context.Context) (out string, err error) {
	onecard.Hide(t.Hidden, func() { out, err = t.run(ctx) })
	return out, err
}

// The kernel kills the tool when the calling thread ends, so the tool does not outlive this
// process.
func (t Tool) run(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.Limit, fmt.Errorf("it has not ended after %s: %w", t.Limit, context.DeadlineExceeded))
	defer cancel()
	runtime.LockOSThread() // the tool dies with the thread that started it
	defer runtime.UnlockOSThread()
	command := exec.CommandContext(ctx, t.Program.Path, t.Args...)
	out := &tail.Writer{Limit: keptOutput}
	command.Stdout, command.Stderr = out, out
	command.Env = append(os.Environ(), append(t.Program.Environment(), "LC_ALL=C")...)
	if t.Lock != nil {
		command.ExtraFiles = []*os.File{t.Lock}
	}
	command.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGKILL) }
	command.WaitDelay = time.Second
	err := command.Run()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return out.Text(), fmt.Errorf("%s failed (%w): %s", filepath.Base(t.Program.Path), err, LastOutput(out.Text()))
	}
	return out.Text(), nil
}

// LastOutput returns the end of a tool's output as one line.
func LastOutput(out string) string {
	out = strings.Join(strings.Fields(out), " ")
	if out == "" {
		return "no output"
	}
	if over := len(out) - shownOutput; over > 0 {
		out = "…" + strings.ToValidUTF8(out[over:], "")
	}
	return out
}
