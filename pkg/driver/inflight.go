package driver

import (
	"context"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
)

// inFlightCalls counts the kubelet's running calls, so that a stopping plugin can wait for them
// before it stops the gRPC server. It also tells a running Prepare call whether one of its claims
// was released meanwhile.
type inFlightCalls struct {
	mu      sync.Mutex
	running int
	idle    chan struct{} // closed while running is 0
	// draining makes enter refuse new Prepare calls. The kubelet retries them, and the next plugin
	// instance answers.
	draining bool
	// prepares has the running Prepare calls.
	prepares map[*prepareCall]struct{}
}

// prepareCall is a running Prepare call. overtaken has the claims that were released since the call
// began.
type prepareCall struct{ overtaken map[types.UID]bool }

type callKey struct{}

func newInFlightCalls() *inFlightCalls {
	idle := make(chan struct{})
	close(idle)
	return &inFlightCalls{idle: idle, prepares: map[*prepareCall]struct{}{}}
}

func (f *inFlightCalls) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	prepares := strings.HasSuffix(info.FullMethod, "/NodePrepareResources")
	if !f.enter(prepares) {
		return nil, status.Error(codes.Unavailable, "the plugin is stopping")
	}
	defer f.leave()
	if prepares {
		c := f.beginPrepare()
		defer f.endPrepare(c)
		ctx = context.WithValue(ctx, callKey{}, c)
	}
	return handler(ctx, req)
}

func (f *inFlightCalls) beginPrepare() *prepareCall {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &prepareCall{overtaken: map[types.UID]bool{}}
	f.prepares[c] = struct{}{}
	return c
}

func (f *inFlightCalls) endPrepare(c *prepareCall) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.prepares, c)
}

// ClaimReleased notes in all running Prepare calls that the claim was released. The caller must
// still hold the claim's lock, because these calls may have read the claim before its release.
func (f *inFlightCalls) ClaimReleased(uid types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.prepares {
		c.overtaken[uid] = true
	}
}

// Overtaken reports whether the claim was released after the Prepare call with this context began.
func (f *inFlightCalls) Overtaken(ctx context.Context, uid types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, _ := ctx.Value(callKey{}).(*prepareCall)
	return c != nil && c.overtaken[uid]
}

// enter counts a new call and returns true. begins is true for a Prepare call and false for any
// other. While the plugin stops, enter returns false for a Prepare call and does not count it.
func (f *inFlightCalls) enter(begins bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if begins && f.draining {
		return false
	}
	if f.running == 0 {
		f.idle = make(chan struct{})
	}
	f.running++
	return true
}

// leave counts the end of a call.
func (f *inFlightCalls) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running--; f.running == 0 {
		close(f.idle)
	}
}

// Drain makes the plugin refuse new Prepare calls, and waits until no call runs. It returns an
// error if the context ends before.
func (f *inFlightCalls) Drain(ctx context.Context) error {
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
