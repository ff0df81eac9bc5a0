package cut

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func (p *Partitions) state(ctx context.Context, r request) (device.CardState, error) {
	a, err := p.observed(ctx, r)
	return partOf(r, a.State, err)
}

func (p *Partitions) timeSlice(ctx context.Context, r request) (device.TimeSlice, error) {
	a, err := p.observed(ctx, r)
	return partOf(r, a.TimeSlice, err)
}

func (p *Partitions) instance(ctx context.Context, r request) (device.Instance, error) {
	a, err := p.observed(ctx, r)
	return partOf(r, a.Instance, err)
}

// partOf returns the part of the worker's answer that r asked for, or an error if it is missing.
func partOf[T any](r request, part *T, err error) (T, error) {
	if err == nil && part == nil {
		err = r.fail(device.FailureOther, "the worker's answer is empty: its version differs")
	}
	if err != nil {
		var none T
		return none, err
	}
	return *part, nil
}

func (p *Partitions) observed(ctx context.Context, r request) (answer, error) {
	start := time.Now()
	a, failure := p.call(ctx, r)
	code := device.FailureCode("")
	if failure != nil {
		code = failure.Code
	}
	if p.observe != nil {
		p.observe(string(r.Op), time.Since(start), string(code))
	}
	if failure != nil {
		return answer{}, failure
	}
	return a, nil
}

// bounded returns a context that ends with ctx, with Close, or after [operationLimit].
func (p *Partitions) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(context.Cause(p.ctx)) })
	cause := fmt.Errorf("it has not ended after %s: %w", operationLimit, context.DeadlineExceeded)
	ctx, done := context.WithTimeoutCause(ctx, operationLimit, cause)
	return ctx, func() {
		done()
		stop()
		cancel(nil)
	}
}

func (p *Partitions) call(ctx context.Context, r request) (answer, *Error) {
	ctx, cancel := p.bounded(ctx)
	defer cancel()
	s := p.slot(r.Card.PCIAddress)
	if s == nil {
		return answer{}, timeoutError(r, errClosed, "nothing was done")
	}
	return s.call(ctx, r)
}

// slot returns the worker slot of a card, or nil after Close.
func (p *Partitions) slot(at device.PCIAddress) *workerSlot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.slots == nil {
		return nil
	}
	if p.slots[at] == nil {
		p.slots[at] = &workerSlot{
			idle: p.idle, busy: make(chan struct{}, 1),
			start: func() (*worker, error) { return startWorker(p.paths, p.command) },
		}
	}
	return p.slots[at]
}

// timeoutError returns the error of a call that ended early, because of cause: its context ended,
// or Partitions was closed. what says whether the operation may have changed the GPU.
func timeoutError(r request, cause error, what string) *Error {
	e := r.fail(device.FailureTimeout, "%v: %s", cause, what)
	e.cause = cause
	return e
}
