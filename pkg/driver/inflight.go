package driver

import (
	"context"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// inflight counts the kubelet's calls that are under way, so that a terminating plugin can let them finish: stopping the gRPC server cuts them off.
type inflight struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed while n is 0
	// draining refuses new Prepares: the kubelet asks again, and another instance, or this Pod's next, answers.
	draining bool
}

func newInflight() *inflight {
	idle := make(chan struct{})
	close(idle)
	return &inflight{idle: idle}
}

func (f *inflight) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !f.enter(strings.HasSuffix(info.FullMethod, "/NodePrepareResources")) {
		return nil, status.Error(codes.Unavailable, "the plugin is stopping")
	}
	defer f.add(-1)
	return handler(ctx, req)
}

// enter admits a call, unless it is one that begins new work while draining.
func (f *inflight) enter(begins bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if begins && f.draining {
		return false
	}
	f.count(1)
	return true
}

func (f *inflight) add(d int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count(d)
}

// count is called with the mutex held.
func (f *inflight) count(d int) {
	was := f.n
	f.n += d
	switch {
	case was == 0 && f.n > 0:
		f.idle = make(chan struct{})
	case was > 0 && f.n == 0:
		close(f.idle)
	}
}

// Drain refuses new Prepares from now on, and returns when no call is under way, or when the context ends.
func (f *inflight) Drain(ctx context.Context) error {
	f.mu.Lock()
	f.draining = true
	idle := f.idle
	f.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
