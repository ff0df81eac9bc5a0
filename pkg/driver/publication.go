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

// How soon publishing is tried again. All nodes of a cluster lose the API server at the same time: each waits twice as long after each failure, and no two
// equally long. In the end a GPU's taint must not come long after the server is back. By itself the slice controller would begin with milliseconds and end with
// a quarter of an hour.
const (
	publishRetry     = 250 * time.Millisecond
	publishRetryMost = 30 * time.Second
)

// publication is the slice controller for as long as this instance has the turn, and what it was given.
type publication struct {
	*publisher
	keeps Features
	on    basis
	stage stages
	// settled says that what is offered need not be asked for again soon.
	settled    bool
	controller *resourceslice.Controller
	// retries has the failures since the controller last had nothing left to do, by pool.
	retries workqueue.TypedRateLimiter[string]
	// dropped wakes the loop when the API server has not kept all fields of a slice, probeAgain when it may keep others than before.
	dropped, probeAgain chan struct{}
}

// publish runs the slice controller until the context ends.
func (p *publisher) publish(ctx context.Context, changed <-chan struct{}) error {
	b, err := p.start(ctx, changed)
	if err != nil {
		return unlessOver(ctx, err)
	}
	defer b.controller.Stop()
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { p.followVersion(ctx, b.probeAgain) })
	b.loop(ctx, changed)
	return nil
}

// start finds out what the cluster keeps and the node has, writes a new node's first slices, and starts the controller with what is published then.
func (p *publisher) start(ctx context.Context, changed <-chan struct{}) (_ *publication, err error) {
	b := &publication{publisher: p, retries: newRetries(), dropped: make(chan struct{}, 1), probeAgain: make(chan struct{}, 1)}
	var known bool
	if b.keeps, known = p.features(ctx); !known {
		return nil, ctx.Err()
	}
	var wanted []resourceslice.Slice
	for known = false; !known; {
		adopted, ok := p.untilWanted(ctx, changed)
		if !ok {
			return nil, ctx.Err()
		}
		if b.on, err = adoptedBasis(adopted, b.keeps); err != nil {
			return nil, err
		}
		if wanted, b.settled, known, err = p.resources(ctx, &b.on, b.keeps); err != nil {
			b.failed(ctx, err)
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(settleInterval + b.retries.When(unknownHolders)):
			}
		}
	}
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	given, published, err := p.first(asking, wanted)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Could not write the first ResourceSlices; the controller will", "err", err)
	}
	if b.stage, err = begin(given, published, time.Now()); err != nil {
		return nil, err
	}
	if err := b.stage.want(wanted); err != nil {
		return nil, err
	}
	b.controller, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: DriverName,
		KubeClient: p.client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.nodeName},
		Resources:  p.pool(given),
		Queue:      workqueue.NewTypedRateLimitingQueue(b.retries),
		SyncDelay:  ptr.To(syncDelay),
		ErrorHandler: func(ctx context.Context, err error, msg string) {
			var dropped *resourceslice.DroppedFieldsError
			switch {
			case errors.As(err, &dropped):
				wake(b.dropped)
			case apierrors.IsInvalid(err):
				wake(b.probeAgain) // the server that was probed may be another one by now
			}
			p.onError(ctx, recoverable(err), msg)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("start the ResourceSlice controller: %w", err)
	}
	return b, nil
}

// loop gives the controller what is to be published until the context ends.
func (b *publication) loop(ctx context.Context, changed <-chan struct{}) {
	var again, unsettled <-chan time.Time
	poll, pause := stagePoll, settleInterval
	for {
		if !b.settled && unsettled == nil {
			unsettled = time.After(pause)
		}
		var staged <-chan time.Time
		if b.stage.waiting() {
			staged = time.After(poll)
		} else {
			poll = stagePoll
		}
		select {
		case <-ctx.Done():
			return
		case <-staged:
			poll = min(poll+poll/4, stagePollMost)
			if b.give(ctx, b.next) {
				poll = stagePoll
			}
			continue
		case <-again:
			again = nil
			b.give(ctx, b.sameAgain)
			continue
		case <-b.dropped:
			// It is not the server any more that was asked; or only one of several is, and the controller takes what that one has kept for what is wanted.
			if again == nil {
				again = time.After(b.retries.When(droppedFields))
			}
			b.reprobe(ctx)
		case <-b.probeAgain:
			b.reprobe(ctx)
		case <-changed:
			pause = settleInterval
		case <-unsettled:
			// A claim may keep a GPU from its layout for weeks. Unprepare wakes this loop.
			if pause = min(2*pause, settleSeldom); b.on.settled {
				pause = settleInterval
			}
		}
		unsettled = nil
		if err := b.want(ctx); err != nil {
			b.settled = false
			b.failed(ctx, err)
		}
	}
}

// want looks at what is to be published now.
func (b *publication) want(ctx context.Context) error {
	wanted, settled, known, err := b.resources(ctx, &b.on, b.keeps)
	if err != nil || !known {
		return err
	}
	b.settled = settled
	return b.stage.want(wanted)
}

// give gives the controller slices, if there are any to be given now.
func (b *publication) give(ctx context.Context, which func() (_ []resourceslice.Slice, ok bool, _ error)) (given bool) {
	slices, ok, err := which()
	if err != nil {
		b.failed(ctx, err)
	}
	if ok {
		b.controller.Update(b.pool(slices))
	}
	return ok
}

// next is what follows, if the controller has written what it was given.
func (b *publication) next() (_ []resourceslice.Slice, ok bool, _ error) {
	stats, failing := b.controller.GetStats(), b.retries.NumRequeues(b.nodeName) > 0
	return b.stage.next(stats.NumCreates+stats.NumUpdates+stats.NumDeletes, failing, time.Now())
}

func (b *publication) sameAgain() (_ []resourceslice.Slice, ok bool, _ error) {
	given, err := unkeep(b.stage.given)
	return given, err == nil, err
}

// failed is told of slices that could not be put together. What is published stays.
func (b *publication) failed(ctx context.Context, err error) {
	b.onError(ctx, recoverable(err), "Could not put this node's ResourceSlices together")
}

// reprobe asks once which fields the API server keeps, and again later if it has no answer: until then
// the loop goes on with what is known, or no taint would be published.
func (b *publication) reprobe(ctx context.Context) {
	now, ok := b.probe(ctx)
	if !ok {
		time.AfterFunc(b.retries.When(unansweredProbe), func() { wake(b.probeAgain) })
		return
	}
	b.retries.Forget(unansweredProbe)
	if now != b.keeps {
		b.keeps = now
		b.retries.Forget(droppedFields)
	}
}

// What is tried again besides the pool, which has the node's name.
const (
	droppedFields   = "/dropped-fields"
	unansweredProbe = "/unanswered-probe"
	unknownHolders  = "/unknown-holders"
)

// scattered makes pauses longer or shorter by up to half.
type scattered struct {
	workqueue.TypedRateLimiter[string]
}

func newRetries() scattered {
	return scattered{workqueue.NewTypedItemExponentialFailureRateLimiter[string](publishRetry, publishRetryMost)}
}

func (s scattered) When(item string) time.Duration {
	pause := s.TypedRateLimiter.When(item)
	return pause/2 + rand.N(pause)
}
