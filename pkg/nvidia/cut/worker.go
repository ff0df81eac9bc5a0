package cut

import (
	"context"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
)

// worker is a child process with NVML open.
type worker struct {
	*child.Process[answer]
	lastUse time.Time
}

func startWorker(p nvidia.Paths, command []string) (*worker, error) {
	process, err := child.Start[answer](child.Command{Args: command}, p)
	if err != nil {
		return nil, err
	}
	return &worker{Process: process}, nil
}

func (w *worker) call(ctx context.Context, r request) (answer, *Error) {
	defer func() { w.lastUse = time.Now() }()
	select {
	case <-w.Messages:
		w.Kill()
		return answer{}, r.fail(device.FailureDied, "unexpected answer without a request; nothing was done")
	default:
	}
	r.Patience = retryFor(ctx)
	_ = w.Send(r) // if it fails, the worker is dead, and Failure says why
	select {
	case a := <-w.Messages:
		return a, nil
	case <-ctx.Done():
		w.Kill()
		return answer{}, timeoutError(r, context.Cause(ctx), "the driver has not answered in time; the result is unknown")
	case <-w.Ended:
		return answer{}, r.fail(device.FailureDied, "the process that talks to the driver died (%v)%s", w.Failure(), w.Stderr())
	}
}
