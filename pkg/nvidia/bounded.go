package nvidia

import (
	"context"
	"fmt"
	"time"
)

// callLimit is how long NVML may take for one question. Attaching a GPU that nothing holds takes
// one to three seconds, and more; see [openings].
const callLimit = 10 * time.Second

// bounded waits for call until ctx ends or the limit is over. A C call cannot be cancelled: one that hangs keeps its goroutine and its thread
// until the process ends, so it must not touch anything that others wait for.
func bounded[T any](ctx context.Context, limit time.Duration, what string, call func() (T, error)) (T, error) {
	return boundedWhile(ctx, limit, nil, newOpenings(), what, call)
}

// boundedWhile is [bounded] for a call that asks NVML many questions: the limit begins again with
// each progress, of this card or of those that are opened. Beside a cut, which locks the whole
// driver, each answer may take long.
func boundedWhile[T any](ctx context.Context, own time.Duration, progress <-chan struct{}, o *openings, what string, call func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		value, err := call()
		done <- answer{value, err}
	}()
	limit, another := o.limit(own)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	var none T
	for {
		select {
		case a := <-done:
			return a.value, a.err
		case <-progress:
		case <-another:
		case <-timer.C:
			return none, fmt.Errorf("%s has not answered for %s", what, limit)
		case <-ctx.Done():
			return none, fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
		limit, another = o.limit(own)
		timer.Reset(limit)
	}
}
