package nvidia

import (
	"bytes"
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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/driverroot"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/onecard"
)

const (
	// smiLimit is how long nvidia-smi may take. Waking a GPU without persistence mode takes one or two seconds, and it may see sixteen of them.
	smiLimit = 40 * time.Second
	// keptOutput is how much of a tool's output is kept.
	keptOutput = 64 << 10
	// shownOutput is how much of it an error shows.
	shownOutput = 300
)

// errNotHidden says that the other cards could not be hidden from a tool, and that it was not run.
var errNotHidden = errors.New("the other GPUs cannot be hidden from it")

// tool is one run of a program of the driver's.
type tool struct {
	program driverroot.Program
	args    []string
	limit   time.Duration
	// lock is an open file whose lock the program shares: while it hangs in the driver, killed or not, nobody else comes to the card. It may be nil.
	lock *os.File
}

// run is the tool's output, also of one that failed. The tool and all that it started are killed when ctx ends or the limit is over, and the tool with
// the thread that calls: it does not outlive this process.
func (t tool) run(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.limit, fmt.Errorf("it has not ended for %s: %w", t.limit, context.DeadlineExceeded))
	defer cancel()
	runtime.LockOSThread() // or the death of this thread would be the tool's
	defer runtime.UnlockOSThread()
	command := exec.CommandContext(ctx, t.program.Path, t.args...)
	out := &tail{limit: keptOutput}
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
		return out.text(), fmt.Errorf("%s failed (%w): %s", filepath.Base(t.program.Path), err, excerpt(out.text()))
	}
	return out.text(), nil
}

// alone runs the tool where the given device nodes cannot be opened.
func (t tool) alone(ctx context.Context, nodes []string) (string, error) {
	type result struct {
		out string
		err error
	}
	done := make(chan result)
	go func() {
		// The thread is never unlocked, so it ends with this goroutine, and its view of the file system with it.
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

// otherNodes are the device nodes of all GPUs but one.
func (m *migReader) otherNodes(minor int) []string {
	return onecard.Others(m.paths.devRoot(), func(name string) bool { return name == fmt.Sprintf("nvidia%d", minor) })
}

// excerpt is the end of a tool's output in one line.
func excerpt(out string) string {
	out = strings.Join(strings.Fields(out), " ")
	if out == "" {
		return "it said nothing"
	}
	if over := len(out) - shownOutput; over > 0 {
		out = "…" + strings.ToValidUTF8(out[over:], "")
	}
	return out
}

// text is all that was kept.
func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.ToValidUTF8(t.kept, []byte("?")))
}
