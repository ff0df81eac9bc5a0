package supervisor

import (
	"context"
	"fmt"
	"sync"
)

// requestQueues lets only one request at a time start, change or stop a daemon. Requests for
// different daemons do not wait for each other.
type requestQueues struct {
	mu    sync.Mutex
	queue map[string]*queue
}

type queue struct {
	token chan struct{} // full while a request works on the daemon
	users int           // number of requests that work on the daemon or wait for it
}

// acquire waits until no other request holds the daemon with this ID. If err is nil, the caller
// must call release at the end of its request. If ctx ends first, acquire returns an error.
func (r *requestQueues) acquire(ctx context.Context, id string) (release func(), err error) {
	r.mu.Lock()
	if r.queue == nil {
		r.queue = map[string]*queue{}
	}
	q := r.queue[id]
	if q == nil {
		q = &queue{token: make(chan struct{}, 1)}
		r.queue[id] = q
	}
	q.users++
	r.mu.Unlock()
	leave := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if q.users--; q.users == 0 {
			delete(r.queue, id)
		}
	}
	select {
	case q.token <- struct{}{}:
		return func() { <-q.token; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("MPS daemon %s is being started or stopped by another request: %w", id, context.Cause(ctx))
	}
}
