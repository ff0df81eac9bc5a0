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
	"k8s.io/apimachinery/pkg/util/wait"
)

// inFlightCalls has the kubelet's running calls, so that a stopping plugin can wait for them before
// it stops the gRPC server. It also tells a running Prepare call whether one of its claims was
// unprepared meanwhile.
type inFlightCalls struct {
	mu      sync.Mutex
	running map[*call]struct{}
	// draining makes intercept refuse new Prepare calls. The kubelet retries them, and the next plugin
	// instance answers.
	draining bool
}

// call is a running call. unprepared has the claims that were unprepared since it began.
type call struct{ unprepared map[types.UID]bool }

type callKey struct{}

func newInFlightCalls() *inFlightCalls {
	return &inFlightCalls{running: map[*call]struct{}{}}
}

// intercept is a [grpc.UnaryServerInterceptor], which runs around each call of the kubelet.
func (f *inFlightCalls) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	c := &call{unprepared: map[types.UID]bool{}}
	f.mu.Lock()
	if f.draining && strings.HasSuffix(info.FullMethod, "/NodePrepareResources") {
		f.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "the plugin is stopping")
	}
	f.running[c] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.running, c)
	}()
	return handler(context.WithValue(ctx, callKey{}, c), req)
}

// Unprepared notes in all running calls that the claim was unprepared. The caller must still hold
// the claim's lock, because these calls may have read the claim before.
func (f *inFlightCalls) Unprepared(claim types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.running {
		c.unprepared[claim] = true
	}
}

// UnpreparedSince reports whether the claim was unprepared after the call with this context began.
func (f *inFlightCalls) UnpreparedSince(ctx context.Context, claim types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, _ := ctx.Value(callKey{}).(*call)
	return c != nil && c.unprepared[claim]
}

// drainPoll is how often Drain checks whether a call still runs. A stopping plugin does nothing
// else.
const drainPoll = 20 * time.Millisecond

// Drain makes the plugin refuse new Prepare calls, and waits until no call runs. It returns an
// error if the context ends before.
func (f *inFlightCalls) Drain(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, drainPoll, true, func(context.Context) (bool, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.draining = true
		return len(f.running) == 0, nil
	})
}
