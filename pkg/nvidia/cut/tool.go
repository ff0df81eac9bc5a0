package cut

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// smiLimit is how long nvidia-smi may take. It wakes each GPU that has persistence mode off,
	// which takes one or two seconds, and a node may have sixteen GPUs.
	smiLimit = 40 * time.Second
	// keptOutput is how many bytes of a tool's output are kept: the last ones.
	keptOutput = 64 << 10
	// shownOutput is how many bytes of the kept output an error message shows.
	shownOutput = 300
)

// errNotHidden says that the tool did not run, because the device nodes of the other GPUs could not
// be hidden.
var errNotHidden = errors.New("the other GPUs cannot be hidden from it")

// tool is a program of the driver with the settings of one run.
type tool struct {
	program driverroot.Program
	args    []string
	limit   time.Duration
	// lock is a locked file that the program inherits. If the program is killed but hangs in the
	// driver, the lock stays until the program ends. lock may be nil.
	lock *os.File
}

// run runs the tool and returns its output, even if it failed. When ctx ends or t.limit passes, run
// kills the tool and its children. The kernel also kills the tool when the calling thread ends, so
// the tool does not outlive this process.
func (t tool) run(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.limit, fmt.Errorf("it has not ended after %s: %w", t.limit, context.DeadlineExceeded))
	defer cancel()
	runtime.LockOSThread() // the tool dies with the thread that started it
	defer runtime.UnlockOSThread()
	command := exec.CommandContext(ctx, t.program.Path, t.args...)
	out := &child.Tail{Limit: keptOutput}
	command.Stdout, command.Stderr = out, out
	command.Env = append(os.Environ(), append(t.program.Environment(driverroot.NVML), "LC_ALL=C")...)
	if t.lock != nil {
		command.ExtraFiles = []*os.File{t.lock}
	}
	command.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGKILL) }
	command.WaitDelay = time.Second
	err := command.Run()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return out.Text(), fmt.Errorf("%s failed (%w): %s", filepath.Base(t.program.Path), err, lastOutput(out.Text()))
	}
	return out.Text(), nil
}

// runHiding does the same as run, but hides the given device nodes: the tool sees them but cannot
// open them. If it cannot hide them, it returns errNotHidden and does not run the tool.
func (t tool) runHiding(ctx context.Context, nodes []string) (string, error) {
	type result struct {
		out string
		err error
	}
	done := make(chan result)
	go func() {
		// The thread must not run other goroutines, because its mount namespace is changed. It is
		// never unlocked, so it ends together with this goroutine.
		runtime.LockOSThread()
		if err := onecard.Hide(nodes); err != nil {
			done <- result{"", fmt.Errorf("%w: %w", errNotHidden, err)}
			return
		}
		out, err := t.run(ctx)
		done <- result{out, err}
	}()
	r := <-done
	return r.out, r.err
}

// otherNodes lists the device nodes of all GPUs except the one with this minor number.
func otherNodes(p nvidia.Paths, minor int) []string {
	return onecard.Others(p.DeviceRoot(), func(name string) bool { return name == fmt.Sprintf("nvidia%d", minor) })
}

// lastOutput returns the end of a tool's output as one line.
func lastOutput(out string) string {
	out = strings.Join(strings.Fields(out), " ")
	if out == "" {
		return "no output"
	}
	if over := len(out) - shownOutput; over > 0 {
		out = "…" + strings.ToValidUTF8(out[over:], "")
	}
	return out
}
