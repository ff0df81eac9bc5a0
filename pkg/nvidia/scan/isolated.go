package scan

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// scanLimit is how long a scan may take, in addition to CallLimit for each GPU. Each single NVML
// query has a much shorter limit.
const scanLimit = 45 * time.Second

// report is the one message that the child of [Isolated] writes to standard output.
type report struct {
	Node     *nvidia.Node          `json:"node,omitempty"`
	NotReady *nvidia.NotReadyError `json:"notReady,omitempty"`
	Failure  string                `json:"failure,omitempty"`
}

// Serve runs in the child process of [Isolated]: it reads [nvidia.Paths] from in and writes the
// result of scanNode to out. It stops when in is closed, so that no child outlives its parent.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	var p nvidia.Paths
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
	return json.NewEncoder(out).Encode(describe(scanNode(ctx, p)))
}

func describe(n nvidia.Node, err error) report {
	var unready *nvidia.NotReadyError
	switch {
	case err == nil:
		return report{Node: &n}
	case errors.As(err, &unready):
		return report{NotReady: unready}
	default:
		return report{Failure: err.Error()}
	}
}

func (r report) result() (nvidia.Node, error) {
	switch {
	case r.NotReady != nil:
		return nvidia.Node{}, r.NotReady
	case r.Failure != "":
		return nvidia.Node{}, errors.New(r.Failure)
	case r.Node == nil:
		return nvidia.Node{}, errors.New("the scanning process reported nothing")
	default:
		return *r.Node, nil
	}
}

// Isolated returns a function that scans in a child process. command starts the child, which
// must call [Serve] on its standard input and output. Each scan returns in bounded time, even
// if the child hangs in the driver.
func Isolated(p nvidia.Paths, command ...string) func(context.Context) (nvidia.Node, error) {
	return (&isolatedScanner{paths: p, command: command}).scan
}

type isolatedScanner struct {
	paths   nvidia.Paths
	command []string
	stuck   atomic.Int32 // running children, including those that cannot be killed
}

func (i *isolatedScanner) scan(ctx context.Context) (nvidia.Node, error) {
	if err := host.Check(i.paths); err != nil {
		return nvidia.Node{}, err // no need to start a process
	}
	if n := i.stuck.Load(); n >= child.MaxStuck {
		return nvidia.Node{}, fmt.Errorf("%d earlier scans still hang in the NVIDIA driver: "+
			"check dmesg, and reset the GPUs or reboot the node", n)
	}
	onBus, _ := host.GPUs(i.paths.WithDefaults().Sysfs) // if unreadable, NVML hardly lists any
	limit := scanLimit + time.Duration(len(onBus))*nvmlx.CallLimit
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the scan has not ended after %s", limit))
	defer cancel()
	return i.runChild(ctx)
}

func (i *isolatedScanner) runChild(ctx context.Context) (nvidia.Node, error) {
	input, err := json.Marshal(i.paths)
	if err != nil {
		return nvidia.Node{}, fmt.Errorf("describe the paths to scan: %w", err)
	}
	command := exec.Command(i.command[0], i.command[1:]...)
	// The parent keeps this pipe open until the scan has ended. If the parent dies, the pipe is
	// closed, and the child ends too.
	stdin, err := command.StdinPipe()
	if err != nil {
		return nvidia.Node{}, fmt.Errorf("start the scanning process: %w", err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		return nvidia.Node{}, fmt.Errorf("start the scanning process: %w", err)
	}
	stderr := &child.Tail{Limit: 2048}
	command.Stderr = stderr
	command.WaitDelay = time.Second
	if err := command.Start(); err != nil {
		return nvidia.Node{}, fmt.Errorf("start the scanning process: %w", err)
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
			_ = command.Process.Kill() // it has answered, but may hang in the driver
			_ = command.Wait()
			return
		}
		_ = stdin.Close()
		a.err = errors.Join(a.err, command.Wait())
		answer <- a
	}()
	select {
	case a := <-answer:
		if a.err != nil {
			return nvidia.Node{}, fmt.Errorf("the scanning process died without an answer (%w)%s", a.err, stderr)
		}
		return a.report.result()
	case <-ctx.Done():
		_ = stdin.Close()
		_ = command.Process.Kill()
		err := fmt.Errorf("scan the GPUs: %w", context.Cause(ctx))
		select {
		case <-gone: // what it had open is closed
			return nvidia.Node{}, err
		case <-time.After(child.KillLimit):
			return nvidia.Node{}, &nvidia.HangingError{PID: command.Process.Pid, Gone: gone, Err: err}
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
