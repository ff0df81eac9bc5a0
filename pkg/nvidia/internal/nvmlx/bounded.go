package nvmlx

import (
	"context"
	"fmt"
	"time"
)

// CallLimit is how long NVML may take for one query. The first query of a GPU that no process has
// open attaches the GPU, which takes one to three seconds or more: see [PendingOpens].
const CallLimit = 10 * time.Second

// Bounded returns the result of call, or an error if ctx ends or limit passes first. A C call
// cannot be cancelled: if call hangs, it keeps its goroutine and thread until the process ends. So
// call must hold no lock that others wait for.
func Bounded[T any](ctx context.Context, limit time.Duration, what string, call func() (T, error)) (T, error) {
	return BoundedWhile(ctx, limit, nil, NewPendingOpens(), what, call)
}

// BoundedWhile is [bounded] for a call with many NVML queries. The limit restarts when progress
// gets a value, and when a card in o answers for the first time. Otherwise a healthy card could
// time out, because a MIG change on another card delays each answer.
func BoundedWhile[T any](
	ctx context.Context, own time.Duration, progress <-chan struct{}, o *PendingOpens, what string, call func() (T, error),
) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		value, err := call()
		done <- answer{value, err}
	}()
	var none T
	for {
		limit, opensChanged := o.Limit(own)
		began := time.Now()
		select {
		case a := <-done:
			return a.value, a.err
		case <-progress:
		case <-opensChanged:
		case <-time.After(limit):
		case <-ctx.Done():
			return none, fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
		// Cards that hang time out together. Each reports so to the others, which must not restart their
		// limit at the moment when it has passed.
		if time.Since(began) >= limit {
			return none, fmt.Errorf("%s has not answered for %s", what, limit)
		}
	}
}

// Sleep waits for pause or until ctx ends. It returns false if ctx has ended.
func Sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-time.After(pause):
		return true
	case <-ctx.Done():
		return false
	}
}
