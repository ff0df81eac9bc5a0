package driver

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
)

// kubeletLife is since when the node's kubelet has been at work, as far as this instance can tell: the kubelet registers it each time that one of the two
// starts, and keeps the Node Ready.
//
// A kubelet remembers across its restarts which claims are prepared, and prepares none of them again. Those whose Pods have gone it gives back once a minute.
// So one that has been at work for a few minutes, and has not given a claim back that no Pod has, does not know it.
type kubeletLife struct {
	mu         sync.Mutex
	registered time.Time
	ready      bool
}

// intercept notes the registrations among the kubelet's calls.
func (k *kubeletLife) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if strings.HasSuffix(info.FullMethod, "/NotifyRegistrationStatus") {
		k.mu.Lock()
		k.registered = time.Now()
		k.mu.Unlock()
	}
	return handler(ctx, req)
}

// See is shown the Node with each change of it.
func (k *kubeletLife) See(node *corev1.Node) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ready = false
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			k.ready = c.Status == corev1.ConditionTrue
		}
	}
}

// AtWork says whether the kubelet has been at work for so long.
func (k *kubeletLife) AtWork(least time.Duration) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ready && !k.registered.IsZero() && time.Since(k.registered) >= least
}
