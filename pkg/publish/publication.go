package publish

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/rollout"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

const (
	// syncDelay is how long the slice controller waits after someone else has changed its slices, so
	// that its cache has caught up with its own writes. The pause must be short: the kubelet deletes
	// the node's slices when it starts, and they must be back within two seconds.
	syncDelay = 500 * time.Millisecond
	// settleInterval is the first pause before slices are built or marked again that are not settled.
	// The pause between builds grows to settleIntervalMax.
	settleInterval    = 2 * time.Second
	settleIntervalMax = 10 * time.Second
	// apiTimeout limits each call of the publisher to the API server. A healthy API server answers at
	// once.
	apiTimeout = 10 * time.Second
	// rolloutPoll is the first pause before the publication looks again whether the slice controller
	// has written a slice. The pause grows to rolloutPollMax, because in an API server outage of hours
	// no node must look a hundred times a second.
	rolloutPoll    = 10 * time.Millisecond
	rolloutPollMax = time.Second
)

// publication publishes the slices while this plugin instance is the leader. It has the slice
// controller (the library's writer of ResourceSlices) and the slices that the controller has to
// write.
//
// Slices are built in the background, one build at a time. Meanwhile the publication marks the last
// ones. So a taint waits for no GPU, and it never decides how a GPU is offered.
type publication struct {
	*Publisher
	features Features
	offer    offer
	// built has the result of the running build. It is nil while none runs.
	built chan buildResult
	// nodeChanged and healthChanged are closed when the node and the health verdicts change.
	nodeChanged, healthChanged <-chan struct{}
	// stale is true if the slices must be built again although the node is the same.
	stale bool
	// marked is false if the taints must be computed again soon.
	marked bool
	// withdrawn has the devices that a cluster without device taints does not get because of their
	// health, and that no claim had according to a list. listing has the result of the running list,
	// and list the last one until the next mark. Before nextList the claims are not listed again.
	// unlistedSince is when the first list began that failed, if all later ones have failed too. It is
	// zero after a successful list and while none is needed.
	withdrawn     sets.Set[string]
	listing       chan claimList
	list          *claimList
	nextList      time.Time
	unlistedSince time.Time
	rollout       *rollout.Rollout
	controller    *resourceslice.Controller
	// owner is the UID of the Node that the controller started with, and stopController stops it.
	owner          types.UID
	stopController func()
	// retries counts the failures since the last success and computes the pause before each retry. Its
	// keys are the pool's name, for the slice controller, and featureProbes.
	retries workqueue.TypedRateLimiter[string]
	// probeAgain wakes the loop when the API server may keep other fields than at the last probe.
	probeAgain wake.Signal
	background sync.WaitGroup
}

type buildResult struct {
	offer offer
	err   error
}

// publish runs the slice controller until the context ends.
func (p *Publisher) publish(ctx context.Context) error {
	b, err := p.start(ctx)
	if err != nil {
		return unlessDone(ctx, err)
	}
	defer func() { b.stopController() }()
	defer b.background.Wait()
	b.background.Go(func() { p.watchVersion(ctx, b.probeAgain) })
	b.update(ctx)
	return unlessDone(ctx, b.loop(ctx))
}

// start finds out which fields the API server keeps, waits until there is something to publish and
// starts the slice controller.
func (p *Publisher) start(ctx context.Context) (_ *publication, err error) {
	b := &publication{Publisher: p, retries: newJitteredLimiter(), probeAgain: wake.New()}
	var known bool
	if b.features, known = p.waitForFeatures(ctx); !known {
		return nil, ctx.Err()
	}
	if b.offer, err = b.firstOffer(ctx); err != nil {
		return nil, err
	}
	var wanted, first []resourceslice.Slice
	wanted = b.firstMark(ctx)
	b.rollout, first = p.newRollout(ctx, wanted)
	return b, b.startController(ctx, first)
}

// startController starts the slice controller with these slices, which belong to the Node.
func (b *publication) startController(ctx context.Context, first []resourceslice.Slice) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	b.owner = *b.nodeUID.Load()
	b.controller, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: device.DriverName,
		KubeClient: b.opts.Client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: b.opts.NodeName, UID: b.owner},
		Resources:  b.driverResources(first),
		Queue:      workqueue.NewTypedRateLimitingQueue(b.retries),
		SyncDelay:  ptr.To(syncDelay),
		ErrorHandler: func(ctx context.Context, err error, msg string) {
			// The API server may have been replaced since the last probe.
			if errors.As(err, new(*resourceslice.DroppedFieldsError)) || apierrors.IsInvalid(err) {
				b.probeAgain.Wake()
			}
			b.reportError(ctx, err, msg)
		},
	})
	b.stopController = func() { cancel(); b.controller.Stop() }
	if err != nil {
		cancel()
		return fmt.Errorf("start the ResourceSlice controller: %w", err)
	}
	return nil
}

// followNode starts the slice controller again if the Node was deleted or has registered again. A
// controller keeps the UID that it started with, and Kubernetes' garbage collector deletes the
// slices of a Node that is gone (kubernetes#132182).
func (b *publication) followNode(ctx context.Context) error {
	now := *b.nodeUID.Load()
	if now == b.owner {
		return nil
	}
	klog.FromContext(ctx).Info("The Node was deleted or has registered again; its ResourceSlices follow", "uidBefore", b.owner, "uid", now)
	b.stopController()
	b.retries.Forget(b.opts.NodeName)
	sent := b.rollout.Sent()
	b.rollout = rollout.New(sent, true, time.Now())
	return b.startController(ctx, sent)
}

// firstOffer waits until there is something to publish. It returns an error if the context ends.
func (b *publication) firstOffer(ctx context.Context) (offer, error) {
	retries := apiRetries()
	for {
		adopted, ok := b.waitForContent(ctx)
		if !ok {
			return offer{}, ctx.Err()
		}
		s := b.opts.Node.View().Offered
		switch {
		case s.Ready:
			o, err := b.build(ctx, s, b.features)
			if err == nil {
				return o, nil
			}
			// It is unknown which devices are allocated, so none of those published may go.
			adopted, listErr := b.adoptSlices(ctx)
			if listErr == nil && len(adopted) > 0 {
				b.reportError(ctx, err, keepingSlices)
				return offer{slices: adopted, adopted: true, snapshot: s, features: b.features}, nil
			}
			b.reportError(ctx, errors.Join(err, listErr), buildFailed)
			select {
			case <-ctx.Done():
				return offer{}, ctx.Err()
			case <-time.After(retries.Step()):
			}
		case s.Empty:
			return offer{snapshot: s, features: b.features, settled: true}, nil
		case len(adopted) > 0:
			o := offer{slices: adopted, adopted: true, features: b.features, settled: true}
			if s.Known {
				o.snapshot = s
			}
			return o, nil
		}
	}
}

const (
	buildFailed   = "Failed to build this node's ResourceSlices"
	keepingSlices = "Failed to read allocated devices; keeping the published ResourceSlices"
)

// loop waits for changes until the context ends. After each it publishes the slices that the node
// then needs.
func (b *publication) loop(ctx context.Context) error {
	var probeDue, buildDue, markDue <-chan time.Time
	probedAt := time.Now()
	poll, pause := rolloutPoll, settleInterval
	for {
		if !b.offer.settled && b.built == nil && buildDue == nil {
			buildDue = time.After(pause)
		}
		if !b.marked && markDue == nil {
			markDue = time.After(settleInterval)
		}
		var rolloutDue <-chan time.Time
		if b.rollout.Pending() {
			rolloutDue = time.After(poll)
		} else {
			poll = rolloutPoll
		}
		select {
		case <-ctx.Done():
			return nil
		case <-rolloutDue:
			poll = min(poll+poll/4, rolloutPollMax)
			if b.sendNext() {
				poll = rolloutPoll
			}
			continue
		case <-b.probeAgain:
			if probeDue == nil {
				// API servers that keep different fields ask for a probe after each write, so an answer alone
				// does not make the next pause short.
				if time.Since(probedAt) > 2*publishRetryMax {
					b.retries.Forget(featureProbes)
				}
				probeDue = time.After(b.retries.When(featureProbes))
			}
			continue
		case <-probeDue:
			probeDue, probedAt = nil, time.Now()
			b.reprobe(ctx)
		case <-b.nodeChanged:
			pause = settleInterval
		case <-b.healthChanged:
		case <-b.rebuild:
			pause, b.stale = settleInterval, true
			if err := b.followNode(ctx); err != nil {
				return err
			}
		case result := <-b.built:
			b.built, buildDue = nil, nil
			if !b.take(ctx, result) {
				continue
			}
		case l := <-b.listing:
			b.takeList(ctx, l)
		case <-markDue:
			markDue = nil
		case <-buildDue:
			// A claim may delay a change of its GPU's partitions for weeks, so the pause grows. When a claim
			// is unprepared, rebuild wakes this loop.
			buildDue, pause, b.stale = nil, min(2*pause, settleIntervalMax), true
		}
		b.update(ctx)
	}
}

// take stores the result of a build. After an error it keeps the slices that are there, and returns
// false.
func (b *publication) take(ctx context.Context, result buildResult) (ok bool) {
	if result.err == nil {
		b.offer = result.offer
		return true
	}
	b.offer.settled = false
	switch {
	case ctx.Err() != nil:
	case b.offer.features != b.features:
		b.reportError(ctx, result.err, buildFailed)
	default:
		b.reportError(ctx, result.err, keepingSlices)
	}
	return false
}

// update starts to build the slices again if they depend on something that has changed. It marks
// the last ones with the taints of now, for the rollout to publish. A node that is not ready keeps
// its slices, because an empty pool would mean that the GPUs are gone.
func (b *publication) update(ctx context.Context) {
	view := b.opts.Node.View()
	b.nodeChanged = view.Changed()
	b.healthChanged = b.opts.Health.Changed() // before the verdicts are read, so that no later change is missed
	s := view.Offered
	switch {
	case s.Ready:
		if b.stale || b.offer.adopted || b.offer.features != b.features || !reflect.DeepEqual(s.Node, b.offer.snapshot.Node) {
			b.startBuild(ctx, s)
		}
	case s.Empty:
		b.offer = offer{snapshot: s, features: b.features, settled: true}
	case s.Known && !b.offer.snapshot.Known:
		b.offer.snapshot = s
	}
	if b.offer.features != b.features {
		b.list = nil
		return // these slices may have fields that the API server no longer keeps
	}
	b.rollout.SetTarget(b.mark(ctx))
}

// startBuild starts to build the slices of the snapshot s, unless a build runs. When that ends, the
// loop looks again whether another one is needed.
func (b *publication) startBuild(ctx context.Context, s inventory.Snapshot) {
	if b.built != nil {
		return
	}
	built, f := make(chan buildResult, 1), b.features
	b.built, b.stale = built, false
	b.background.Go(func() {
		o, err := b.build(ctx, s, f)
		built <- buildResult{o, err}
	})
}

// sendNext passes the next slices to the slice controller. sent is false if there are none, or
// while the controller has not written the previous ones.
func (b *publication) sendNext() (sent bool) {
	stats, failing := b.controller.GetStats(), b.retries.NumRequeues(b.opts.NodeName) > 0
	next, ok := b.rollout.Next(stats.NumCreates+stats.NumUpdates+stats.NumDeletes, failing, time.Now())
	if ok {
		b.controller.Update(b.driverResources(next))
	}
	return ok
}

// driverResources returns the slices in the form that the slice controller takes. The controller
// copies them, and writes only slices that differ from those in the API server.
func (p *Publisher) driverResources(slices []resourceslice.Slice) *resourceslice.DriverResources {
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.opts.NodeName: {Slices: slices}}}
}

// reprobe probes once which fields the API server keeps. If there is no answer, the loop tries
// again. Meanwhile it publishes slices with the fields known so far, so taints are not delayed.
func (b *publication) reprobe(ctx context.Context) {
	now, ok := b.probe(ctx)
	switch {
	case !ok:
		b.probeAgain.Wake()
	case now != b.features:
		b.features = now
	default:
		// One of several API servers may have dropped fields. The controller now takes the stored
		// slices, without these fields, for the wanted ones, so it must get these again.
		b.controller.Update(b.driverResources(b.rollout.Sent()))
	}
}
