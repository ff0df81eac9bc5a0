package supervisor

import (
	"context"
	"fmt"
	"sync"
)

// requestQueues lets only one request at a time start, change or stop a daemon. Requests for
// different daemons do not wait for each other. It maps the ID of each daemon on which a request
// works to a channel that is closed when the request ends.
type requestQueues struct{ sync.Map }

// acquire waits until no other request holds the daemon with this ID. If err is nil, the caller
// must call release at the end of its request. If ctx ends first, acquire returns an error.
func (r *requestQueues) acquire(ctx context.Context, id string) (release func(), err error) {
	done := make(chan struct{})
	for {
		other, busy := r.LoadOrStore(id, done)
		if !busy {
			return func() {
				r.Delete(id)
				close(done)
			}, nil
		}
		select {
		case <-other.(chan struct{}): //nolint:forcetypeassert // the map has no other values
		case <-ctx.Done():
			return nil, fmt.Errorf("MPS daemon %s is being started or stopped by another request: %w", id, context.Cause(ctx))
		}
	}
}
