package scan

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
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
	p, ctx, end, err := child.Order[nvidia.Paths](ctx, in)
	if err != nil {
		return fmt.Errorf("read the paths to scan: %w", err)
	}
	defer end()
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

	mu       sync.Mutex
	children []*child.Process[report] // those that may not have ended
}

func (i *isolatedScanner) scan(ctx context.Context) (nvidia.Node, error) {
	if err := host.Check(i.paths); err != nil && !i.paths.Passthrough {
		return nvidia.Node{}, err // no need to start a process
	}
	if n := i.running(); n >= child.MaxStuck {
		return nvidia.Node{}, fmt.Errorf("%d earlier scans still hang in the NVIDIA driver: "+
			"check dmesg, and reset the GPUs or reboot the node", n)
	}
	onBus, _ := host.GPUs(i.paths.WithDefaults().Sysfs) // if unreadable, NVML hardly lists any
	limit := scanLimit + time.Duration(len(onBus))*nvmlx.CallLimit
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the scan has not ended after %s", limit))
	defer cancel()
	return i.runChild(ctx)
}

// running counts the child processes that have not ended, including those that cannot be killed.
func (i *isolatedScanner) running() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.children = slices.DeleteFunc(i.children, (*child.Process[report]).IsGone)
	return len(i.children)
}

func (i *isolatedScanner) runChild(ctx context.Context) (nvidia.Node, error) {
	c, err := child.Start[report](child.Command{Args: i.command}, i.paths)
	if err != nil {
		return nvidia.Node{}, fmt.Errorf("start the scanning process: %w", err)
	}
	i.mu.Lock()
	i.children = append(i.children, c)
	i.mu.Unlock()
	defer c.Kill() // it may hang in the driver even after its answer
	select {
	case r := <-c.Messages:
		return r.result()
	case <-c.Ended:
		err = fmt.Errorf("the scanning process died without an answer (%w)%s", c.Failure(), c.Stderr())
	case <-ctx.Done():
		c.Kill()
		err = fmt.Errorf("scan the GPUs: %w", context.Cause(ctx))
	}
	select {
	case <-c.Gone: // what it had open is closed
		return nvidia.Node{}, err
	case <-time.After(child.KillLimit):
		return nvidia.Node{}, c.Hanging(err)
	}
}
