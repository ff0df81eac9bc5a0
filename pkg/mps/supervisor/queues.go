package supervisor

import (
	"context"
	"fmt"
	"sync"
)

// requestQueues lets only one request at a time start, change or stop a daemon. Requests for
// different daemons do not wait for each other.
type requestQueues struct {
	mu sync.Mutex
	// working has a channel for each daemon on which a request works. It is closed when the request
	// ends.
	working map[string]chan struct{}
}

// acquire waits until no other request holds the daemon with this ID. If err is nil, the caller
// must call release at the end of its request. If ctx ends first, acquire returns an error.
func (r *requestQueues) acquire(ctx context.Context, id string) (release func(), err error) {
	for {
		r.mu.Lock()
		other := r.working[id]
		if other == nil {
			done := make(chan struct{})
			if r.working == nil {
				r.working = map[string]chan struct{}{}
			}
			r.working[id] = done
			r.mu.Unlock()
			return func() { r.finish(id, done) }, nil
		}
		r.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, fmt.Errorf("MPS daemon %s is being started or stopped by another request: %w", id, context.Cause(ctx))
		}
	}
}

func (r *requestQueues) finish(id string, done chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.working, id)
	close(done)
}
