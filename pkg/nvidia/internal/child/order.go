package child

import (
	"context"
	"encoding/json"
	"io"
)

// Order runs in the child process: it reads the order that the parent sent with [Start]. The
// returned context ends with ctx or when in is closed, because the child must not outlive its
// parent.
func Order[O any](ctx context.Context, in io.Reader) (O, context.Context, context.CancelFunc, error) {
	var order O
	if err := json.NewDecoder(in).Decode(&order); err != nil {
		return order, ctx, func() {}, err
	}
	ctx, end := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, in)
		end()
	}()
	return order, ctx, end, nil
}
