package driver

import (
	"context"
	"sync"

	"google.golang.org/grpc"
)

// inflight counts the kubelet's calls that are under way, so that a terminating plugin can let them finish: stopping the gRPC server cuts them off.
type inflight struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed while n is 0
}

func newInflight() *inflight {
	idle := make(chan struct{})
	close(idle)
	return &inflight{idle: idle}
}

func (f *inflight) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	f.add(1)
	defer f.add(-1)
	return handler(ctx, req)
}

func (f *inflight) add(d int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.n
	f.n += d
	switch {
	case was == 0 && f.n > 0:
		f.idle = make(chan struct{})
	case was > 0 && f.n == 0:
		close(f.idle)
	}
}

// Wait returns when no call is under way, or when the context ends.
func (f *inflight) Wait(ctx context.Context) error {
	f.mu.Lock()
	idle := f.idle
	f.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
