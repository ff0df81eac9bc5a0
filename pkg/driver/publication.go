package driver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// publishRetry and publishRetryMax are the shortest and the longest pause between retries. The
// pauses grow and are randomized, because all nodes of a cluster lose the API server together.
// publishRetryMax is short, so that taints appear soon after the API server is back. The slice
// controller's own pauses can reach a quarter of an hour.
const (
	publishRetry    = 250 * time.Millisecond
	publishRetryMax = 30 * time.Second
)

// publication publishes the slices while this plugin instance is the leader. It has the slice
// controller (the library's writer of ResourceSlices) and the slices that the controller has to
// write.
type publication struct {
	*publisher
	features Features
	offer    lastOffer
	rollout  sliceRollout
	// settled is false if the slices must soon be built again even if nothing changes, for example
	// because a claim delays a change.
	settled    bool
	controller *resourceslice.Controller
	// retries counts the failures since the last success and computes the pause before each retry. Its
	// keys are the pool's name, for the slice controller, and the constants below.
	retries workqueue.TypedRateLimiter[string]
	// fieldsDropped wakes the loop when the API server dropped fields of a slice. probeAgain wakes the
	// loop when the API server may keep other fields than at the last probe.
	fieldsDropped, probeAgain chan struct{}
}

// publish runs the slice controller until the context ends. changed tells that the slices may have
// to change.
func (p *publisher) publish(ctx context.Context, changed <-chan struct{}) error {
	b, err := p.start(ctx, changed)
	if err != nil {
		return unlessDone(ctx, err)
	}
	defer b.controller.Stop()
	var background sync.WaitGroup
	defer background.Wait()
	background.Go(func() { p.watchVersion(ctx, b.probeAgain) })
	b.loop(ctx, changed)
	return nil
}

// start finds out which fields the API server keeps, waits until there is something to publish,
// creates the slices of a new node and starts the slice controller.
func (p *publisher) start(ctx context.Context, changed <-chan struct{}) (_ *publication, err error) {
	b := &publication{
		publisher: p, retries: newJitteredLimiter(),
		fieldsDropped: make(chan struct{}, 1), probeAgain: make(chan struct{}, 1),
	}
	var known bool
	if b.features, known = p.waitForFeatures(ctx); !known {
		return nil, ctx.Err()
	}
	var wanted []resourceslice.Slice
	for known = false; !known; {
		adopted, ok := p.waitForContent(ctx, changed)
		if !ok {
			return nil, ctx.Err()
		}
		if b.offer, err = adoptedOffer(adopted, b.features); err != nil {
			return nil, err
		}
		if wanted, b.settled, known, err = p.buildSlices(ctx, &b.offer, b.features); err != nil {
			b.reportFailure(ctx, err)
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(settleInterval + b.retries.When(unknownAllocations)):
			}
		}
	}
	callCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	first, published, err := p.publishFirst(callCtx, wanted)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Failed to write the first ResourceSlices; the controller will write them", "err", err)
	}
	if b.rollout, err = newSliceRollout(first, published, time.Now()); err != nil {
		return nil, err
	}
	if err := b.rollout.setTarget(wanted); err != nil {
		return nil, err
	}
	b.controller, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: DriverName,
		KubeClient: p.client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.nodeName},
		Resources:  p.driverResources(first),
		Queue:      workqueue.NewTypedRateLimitingQueue(b.retries),
		SyncDelay:  ptr.To(syncDelay),
		ErrorHandler: func(ctx context.Context, err error, msg string) {
			var dropped *resourceslice.DroppedFieldsError
			switch {
			case errors.As(err, &dropped):
				wake(b.fieldsDropped)
			case apierrors.IsInvalid(err):
				wake(b.probeAgain) // the API server may have been replaced since the last probe
			}
			p.onError(ctx, recoverable(err), msg)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("start the ResourceSlice controller: %w", err)
	}
	return b, nil
}

// loop waits for changes until the context ends, builds the slices again after each, and passes
// changed ones to the slice controller.
func (b *publication) loop(ctx context.Context, changed <-chan struct{}) {
	var resendDue, retryDue <-chan time.Time
	poll, pause := rolloutPoll, settleInterval
	for {
		if !b.settled && retryDue == nil {
			retryDue = time.After(pause)
		}
		var rolloutDue <-chan time.Time
		if b.rollout.pending() {
			rolloutDue = time.After(poll)
		} else {
			poll = rolloutPoll
		}
		select {
		case <-ctx.Done():
			return
		case <-rolloutDue:
			poll = min(poll+poll/4, rolloutPollMax)
			if b.send(ctx, b.nextSlices) {
				poll = rolloutPoll
			}
			continue
		case <-resendDue:
			resendDue = nil
			b.send(ctx, b.lastSlices)
			continue
		case <-b.fieldsDropped:
			// The API server was replaced since the probe, or one of several API servers drops fields. The
			// slices must be sent again, because the controller now takes the stored slices, without these
			// fields, for the wanted ones.
			if resendDue == nil {
				resendDue = time.After(b.retries.When(droppedFields))
			}
			b.reprobe(ctx)
		case <-b.probeAgain:
			b.reprobe(ctx)
		case <-changed:
			pause = settleInterval
		case <-retryDue:
			// A claim may delay a change of its GPU's partitions for weeks, so the pause grows. When a claim
			// is unprepared, changed wakes this loop.
			if pause = min(2*pause, settleIntervalMax); b.offer.settled {
				pause = settleInterval
			}
		}
		retryDue = nil
		if err := b.update(ctx); err != nil {
			b.settled = false
			b.reportFailure(ctx, err)
		}
	}
}

// update builds the slices again, for the rollout to publish. If the node is not ready and there
// are no earlier slices to keep, it changes nothing.
func (b *publication) update(ctx context.Context) error {
	wanted, settled, known, err := b.buildSlices(ctx, &b.offer, b.features)
	if err != nil || !known {
		return err
	}
	b.settled = settled
	return b.rollout.setTarget(wanted)
}

// send passes the slices that the function choose returns to the slice controller. sent is false if
// choose returned false. An error of choose is reported.
func (b *publication) send(ctx context.Context, choose func() (_ []resourceslice.Slice, ok bool, _ error)) (sent bool) {
	slices, ok, err := choose()
	if err != nil {
		b.reportFailure(ctx, err)
	}
	if ok {
		b.controller.Update(b.driverResources(slices))
	}
	return ok
}

// nextSlices returns the slices to pass to the slice controller now. ok is false if there are none,
// or while the controller has not written the previous ones.
func (b *publication) nextSlices() (_ []resourceslice.Slice, ok bool, _ error) {
	stats, failing := b.controller.GetStats(), b.retries.NumRequeues(b.nodeName) > 0
	return b.rollout.next(stats.NumCreates+stats.NumUpdates+stats.NumDeletes, failing, time.Now())
}

func (b *publication) lastSlices() (_ []resourceslice.Slice, ok bool, _ error) {
	sent, err := decodeSlices(b.rollout.sent)
	return sent, err == nil, err
}

// reportFailure reports that the slices could not be built. The published slices stay as they are.
func (b *publication) reportFailure(ctx context.Context, err error) {
	b.onError(ctx, recoverable(err), "Failed to build this node's ResourceSlices")
}

// reprobe probes once which fields the API server keeps. If there is no answer, it schedules
// another probe. Meanwhile the loop publishes slices with the fields known so far, so that taints
// are not delayed.
func (b *publication) reprobe(ctx context.Context) {
	now, ok := b.probe(ctx)
	if !ok {
		time.AfterFunc(b.retries.When(unansweredProbe), func() { wake(b.probeAgain) })
		return
	}
	b.retries.Forget(unansweredProbe)
	if now != b.features {
		b.features = now
		b.retries.Forget(droppedFields)
	}
}

// These keys count other failures than those of the slice controller in the retry limiter. The
// controller's own key is the pool's name, which is the node's name.
const (
	droppedFields      = "/dropped-fields"
	unansweredProbe    = "/unanswered-probe"
	unknownAllocations = "/unknown-allocations"
)

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
