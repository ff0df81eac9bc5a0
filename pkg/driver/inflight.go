package driver

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
)

// inflight counts the kubelet's calls that are under way, so that a terminating plugin can let them finish: stopping the gRPC server cuts them off.
// It also remembers, while they are, which of them began before a claim was given back; and it knows when there are none, which is when the process can put
// its memory in order.
type inflight struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed while n is 0
	// draining refuses new Prepares: the kubelet asks again, and another instance, or this Pod's next, answers.
	draining bool
	// calls are those that prepare.
	calls map[*call]struct{}
	// quiet and resting are due quietAfter and restingAfter the last call has ended.
	quiet, resting *time.Timer
}

// call is one of the kubelet's, from before its claims are read.
type call struct{ overtaken map[types.UID]bool }

type callKey struct{}

// newInflight has quiet called each time that there were calls, and none has come for a moment, and resting if none comes for longer.
func newInflight(quiet, resting func()) *inflight {
	idle := make(chan struct{})
	close(idle)
	return &inflight{idle: idle, calls: map[*call]struct{}{}, quiet: time.AfterFunc(quietAfter, quiet), resting: time.AfterFunc(restingAfter, resting)}
}

func (f *inflight) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	prepares := strings.HasSuffix(info.FullMethod, "/NodePrepareResources")
	if !f.enter(prepares) {
		return nil, status.Error(codes.Unavailable, "the plugin is stopping")
	}
	defer f.add(-1)
	if prepares {
		c := f.begin()
		defer f.end(c)
		ctx = context.WithValue(ctx, callKey{}, c)
	}
	return handler(ctx, req)
}

func (f *inflight) begin() *call {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &call{overtaken: map[types.UID]bool{}}
	f.calls[c] = struct{}{}
	return c
}

func (f *inflight) end(c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.calls, c)
}

// GivenBack is told of a claim before its lock is let go of: the calls that are under way may have read it before.
func (f *inflight) GivenBack(uid types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.calls {
		c.overtaken[uid] = true
	}
}

// Overtaken says whether the claim was given back since the call began that the context is of.
func (f *inflight) Overtaken(ctx context.Context, uid types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, _ := ctx.Value(callKey{}).(*call)
	return c != nil && c.overtaken[uid]
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
		f.quiet.Stop()
		f.resting.Stop()
	case was > 0 && f.n == 0:
		close(f.idle)
		f.quiet.Reset(quietAfter)
		f.resting.Reset(restingAfter)
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
