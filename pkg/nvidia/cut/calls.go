package cut

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
)

func (p *Partitions) state(ctx context.Context, r request) (device.CardState, error) {
	a, err := p.observed(ctx, r)
	return a.State, err
}

// observed sends r to the card's worker and reports the result to the observer.
func (p *Partitions) observed(ctx context.Context, r request) (answer, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	start := time.Now()
	a := p.slot(r.Card.PCIAddress).call(ctx, r)
	var code device.FailureCode
	var err error
	if a.Error != nil {
		code, err = a.Error.Code, a.Error
	}
	if p.observe != nil {
		p.observe(string(r.Op), time.Since(start), string(code))
	}
	return a, err
}

// bounded returns a context that ends with ctx or after [operationLimit].
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	cause := fmt.Errorf("it has not ended after %s: %w", operationLimit, context.DeadlineExceeded)
	return context.WithTimeoutCause(ctx, operationLimit, cause)
}

// slot returns the worker slot of a card.
func (p *Partitions) slot(at device.PCIAddress) *workerSlot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.slots[at] == nil {
		p.slots[at] = &workerSlot{
			idle: p.idle, busy: make(chan struct{}, 1),
			start: func() (*worker, error) { return child.Start[answer](child.Command{Args: p.command}, p.paths) },
		}
	}
	return p.slots[at]
}

// timeoutError returns the error of a call whose context ended because of cause. what says whether
// the operation may have changed the GPU.
func timeoutError(r request, cause error, what string) *nvidia.Error {
	e := r.fail(device.FailureTimeout, "%v: %s", cause, what)
	e.Cause = cause
	return e
}
