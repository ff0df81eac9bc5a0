package supervisor

import (
	"context"
	"fmt"
	"sync"
)

// turns lets one request at a time work on a daemon. Those for other daemons do not wait.
type turns struct {
	mu    sync.Mutex
	queue map[string]*queue
}

type queue struct {
	turn  chan struct{} // holds a token while someone works
	users int           // who works or waits
}

// take waits for the daemon's turn.
func (t *turns) take(ctx context.Context, id string) (release func(), err error) {
	t.mu.Lock()
	if t.queue == nil {
		t.queue = map[string]*queue{}
	}
	q := t.queue[id]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		t.queue[id] = q
	}
	q.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if q.users--; q.users == 0 {
			delete(t.queue, id)
		}
	}
	select {
	case q.turn <- struct{}{}:
		return func() { <-q.turn; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("MPS daemon %s is being started or stopped for another request: %w", id, context.Cause(ctx))
	}
}
