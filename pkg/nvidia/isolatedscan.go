package nvidia

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// scanLimit is how long a scan may take, in addition to callLimit for each GPU. Each single NVML
	// query has a much shorter limit.
	scanLimit = 45 * time.Second
	// maxStuck is how many child processes may hang in the driver at once. Then no more are started,
	// because a process in uninterruptible sleep cannot be killed, and each further one could hang
	// too.
	maxStuck = 4
	// killLimit is how long to wait until a killed child process ends. It ends within milliseconds
	// unless it hangs in the driver.
	killLimit = 2 * time.Second
)

// HangingError says that a process hangs in the driver and keeps NVML open until it ends.
type HangingError struct {
	PID int
	// Gone is closed when the process has ended.
	Gone <-chan struct{}
	err  error
}

func (e *HangingError) Error() string {
	return fmt.Sprintf("%v; process %d hangs in the NVIDIA driver: check dmesg, and reset the GPU or reboot the node", e.err, e.PID)
}

func (e *HangingError) Unwrap() error { return e.err }

// report is the one message that the child of [Isolated] writes to standard output.
type report struct {
	Node     *Node          `json:"node,omitempty"`
	NotReady *NotReadyError `json:"notReady,omitempty"`
	Failure  string         `json:"failure,omitempty"`
}

// ServeScan runs in the child process of [Isolated]: it reads [Paths] from in and writes the result
// of [Scan] to out. It stops when in is closed, so that no child outlives its parent.
func ServeScan(ctx context.Context, in io.Reader, out io.Writer) error {
	var p Paths
	decoder := json.NewDecoder(in)
	if err := decoder.Decode(&p); err != nil {
		return fmt.Errorf("read the paths to scan: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	return json.NewEncoder(out).Encode(describe(Scan(ctx, p)))
}

func describe(n Node, err error) report {
	var unready *NotReadyError
	switch {
	case err == nil:
		return report{Node: &n}
	case errors.As(err, &unready):
		return report{NotReady: unready}
	default:
		return report{Failure: err.Error()}
	}
}

func (r report) result() (Node, error) {
	switch {
	case r.NotReady != nil:
		return Node{}, r.NotReady
	case r.Failure != "":
		return Node{}, errors.New(r.Failure)
	case r.Node == nil:
		return Node{}, errors.New("the scanning process reported nothing")
	default:
		return *r.Node, nil
	}
}

// Isolated returns a function that runs [Scan] in a child process. command starts the child, which
// must call [ServeScan] on its standard input and output. Each scan returns in bounded time, even
// if the child hangs in the driver.
func Isolated(p Paths, command ...string) func(context.Context) (Node, error) {
	return (&isolatedScanner{paths: p, command: command}).scan
}

type isolatedScanner struct {
	paths   Paths
	command []string
	stuck   atomic.Int32 // running children, including those that cannot be killed
}

func (i *isolatedScanner) scan(ctx context.Context) (Node, error) {
	if err := Check(i.paths); err != nil {
		return Node{}, err // no need to start a process
	}
	if n := i.stuck.Load(); n >= maxStuck {
		return Node{}, fmt.Errorf("%d earlier scans still hang in the NVIDIA driver: check dmesg, and reset the GPUs or reboot the node", n)
	}
	onBus, _ := pciGPUs(i.paths.withDefaults().Sysfs) // if unreadable, NVML hardly lists any
	limit := scanLimit + time.Duration(len(onBus))*callLimit
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the scan has not ended after %s", limit))
	defer cancel()
	return i.runChild(ctx)
}

func (i *isolatedScanner) runChild(ctx context.Context) (Node, error) {
	input, err := json.Marshal(i.paths)
	if err != nil {
		return Node{}, fmt.Errorf("describe the paths to scan: %w", err)
	}
	child := exec.Command(i.command[0], i.command[1:]...)
	// The parent keeps this pipe open until the scan has ended. If the parent dies, the pipe is
	// closed, and the child ends too.
	stdin, err := child.StdinPipe()
	if err != nil {
		return Node{}, fmt.Errorf("start the scanning process: %w", err)
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		return Node{}, fmt.Errorf("start the scanning process: %w", err)
	}
	stderr := &tail{limit: 2048}
	child.Stderr = stderr
	child.WaitDelay = time.Second
	if err := child.Start(); err != nil {
		return Node{}, fmt.Errorf("start the scanning process: %w", err)
	}

	answer, gone := make(chan childAnswer, 1), make(chan struct{})
	i.stuck.Add(1)
	go func() {
		defer close(gone)
		defer i.stuck.Add(-1)
		a := exchange(input, stdin, stdout)
		if a.err == nil {
			answer <- a
			_ = stdin.Close()
			_ = child.Process.Kill() // it has answered, but may hang in the driver
			_ = child.Wait()
			return
		}
		_ = stdin.Close()
		a.err = errors.Join(a.err, child.Wait())
		answer <- a
	}()
	select {
	case a := <-answer:
		if a.err != nil {
			return Node{}, fmt.Errorf("the scanning process died without an answer (%w)%s", a.err, stderr)
		}
		return a.report.result()
	case <-ctx.Done():
		_ = stdin.Close()
		_ = child.Process.Kill()
		err := fmt.Errorf("scan the GPUs: %w", context.Cause(ctx))
		select {
		case <-gone: // what it had open is closed
			return Node{}, err
		case <-time.After(killLimit):
			return Node{}, &HangingError{PID: child.Process.Pid, Gone: gone, err: err}
		}
	}
}

type childAnswer struct {
	report report
	err    error
}

func exchange(input []byte, stdin io.Writer, stdout io.Reader) childAnswer {
	if _, err := stdin.Write(append(input, '\n')); err != nil && !errors.Is(err, os.ErrClosed) {
		return childAnswer{err: err}
	}
	var a childAnswer
	a.err = json.NewDecoder(stdout).Decode(&a.report)
	return a
}

// tail is a writer that keeps the last bytes written to it.
type tail struct {
	limit int
	mu    sync.Mutex
	kept  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = bytes.Clone(t.kept[over:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.kept) == 0 {
		return ""
	}
	return ": " + strings.TrimSpace(string(t.kept))
}
