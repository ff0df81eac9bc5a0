package cut

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
)

// worker is a child process with NVML open.
type worker = child.Process[answer]

// workerSlot holds the worker process of one card. The channel busy is its lock: a goroutine may
// use the other fields between its send to busy and its receive from it.
type workerSlot struct {
	idle  time.Duration
	start func() (*worker, error)
	busy  chan struct{}
	// worker is the worker that was started last. It may have ended.
	worker *worker
	timer  *time.Timer
}

// call sends r to the card's worker after all earlier requests and returns the answer. After an
// error that a new process may cure, it kills the worker.
func (s *workerSlot) call(ctx context.Context, r request) answer {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return answer{Error: timeoutError(r, context.Cause(ctx), "an earlier call on this GPU is still running; nothing was done")}
	}
	defer func() { <-s.busy }()
	if s.timer != nil {
		s.timer.Stop()
	}
	w, failure := s.readyWorker(ctx, r)
	if failure != nil {
		return answer{Error: failure}
	}
	a := ask(ctx, w, r)
	if a.Error != nil && !keepsWorker(a.Error) {
		w.Kill()
	} else {
		s.timer = time.AfterFunc(s.idle, func() { s.stopIdle(w) })
	}
	return a
}

// ask sends r to the worker and returns its answer, or why it has none.
func ask(ctx context.Context, w *worker, r request) answer {
	_ = w.Send(r) // if it fails, the worker is dead, and Failure says why
	select {
	case a := <-w.Messages:
		return a
	case <-ctx.Done():
		return answer{Error: timeoutError(r, context.Cause(ctx), "the driver has not answered in time; the result is unknown")}
	case <-w.Ended:
		return answer{Error: r.fail(device.FailureDied, "the process that talks to the driver died (%v)%s", w.Failure(), w.Stderr())}
	}
}

// keepsWorker reports whether the worker can be used again after this error. After any other error,
// a new worker process is more likely to succeed.
func keepsWorker(e *nvidia.Error) bool {
	switch e.Code {
	case device.FailureInUse, device.FailureInsufficient, device.FailureNotFound, device.FailureNotSupported, device.FailureChanged:
		return true
	}
	return false
}

// readyWorker returns a worker that can take a request, and starts one if there is none. If the
// last worker was killed but hangs, it waits until that process is gone, and returns an error if
// ctx ends first.
func (s *workerSlot) readyWorker(ctx context.Context, r request) (*worker, *nvidia.Error) {
	if w := s.worker; w != nil {
		if w.IsUsable() {
			return w, nil
		}
		select {
		case <-w.Gone:
		case <-ctx.Done():
			what := fmt.Sprintf("an earlier call still hangs in the NVIDIA driver (process %d): check dmesg, and reset the GPU or reboot the node",
				w.PID)
			return nil, timeoutError(r, context.Cause(ctx), what)
		}
		s.worker = nil
	}
	w, err := s.start()
	if err != nil {
		return nil, r.fail(device.FailureOther, "start the worker: %v; nothing was done", err)
	}
	s.worker = w
	return w, nil
}

// stopIdle ends the worker w, unless a call uses it or another worker has replaced it.
func (s *workerSlot) stopIdle(w *worker) {
	select {
	case s.busy <- struct{}{}:
	default:
		return // a call uses the worker
	}
	defer func() { <-s.busy }()
	if s.worker == w {
		w.Kill()
	}
}

// stop ends the worker of the card after its current call, and waits until the process is gone. If
// ctx ends first, it returns an error.
func (s *workerSlot) stop(ctx context.Context) error {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("it is still running a call: %w", context.Cause(ctx))
	}
	defer func() { <-s.busy }()
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.worker == nil {
		return nil
	}
	s.worker.Kill()
	select {
	case <-s.worker.Gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d hangs in the NVIDIA driver: check dmesg, and reset the GPU or reboot the node: %w",
			s.worker.PID, context.Cause(ctx))
	}
}
