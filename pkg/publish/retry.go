package publish

import (
	"math"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
)

// publishRetry and publishRetryMax are the shortest and the longest pause between retries. The
// pauses grow and are randomized, because all nodes of a cluster lose the API server together.
// publishRetryMax is short, so that taints appear soon after the API server is back. The slice
// controller's own pauses can reach a quarter of an hour.
const (
	publishRetry    = 250 * time.Millisecond
	publishRetryMax = 30 * time.Second
)

// featureProbes counts probes in the retry limiter. The slice controller's own key is the pool's
// name, which is the node's name.
const featureProbes = "/feature-probes"

// apiRetries returns growing pauses between attempts to reach the API server.
func apiRetries() *wait.Backoff {
	return &wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.5, Steps: math.MaxInt, Cap: publishRetryMax}
}

// jitteredLimiter makes each pause randomly shorter or longer by up to half.
type jitteredLimiter struct {
	workqueue.TypedRateLimiter[string]
}

func newJitteredLimiter() jitteredLimiter {
	return jitteredLimiter{workqueue.NewTypedItemExponentialFailureRateLimiter[string](publishRetry, publishRetryMax)}
}

func (l jitteredLimiter) When(item string) time.Duration {
	pause := l.TypedRateLimiter.When(item)
	return pause/2 + rand.N(pause)
}
