package steps

import (
	"context"
	"fmt"
	"time"
)

const (
	// CallTime limits the time that Prepare works on the hardware, however long the kubelet waits.
	CallTime = 40 * time.Second
	// AnswerTime is the part of the kubelet's timeout that is left to report an error.
	AnswerTime = 2 * time.Second
	// UndoTime is the part of the kubelet's timeout that is kept free to undo a failed Prepare.
	UndoTime = 8 * time.Second
	// DestroyTime is the longest time that one call waits until no process uses the MIG instances that
	// it must remove. Other claims on the GPU wait too.
	DestroyTime = 20 * time.Second
	// PeriodicTime limits how long Reconcile and other periodic work keep a GPU locked to remove MIG
	// instances or stop daemons that may be in use. The next pass retries soon.
	PeriodicTime = 5 * time.Second
)

// WithTimeout returns a context for work on the hardware. It ends after the duration "most", or
// earlier if the caller's deadline minus "reserve" comes first.
func WithTimeout(ctx context.Context, most, reserve time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(deadline)-reserve)
	}
	return context.WithTimeoutCause(ctx, most, fmt.Errorf("not done within %s", most.Round(time.Second)))
}
