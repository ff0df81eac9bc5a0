package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// syncDelay is how long the slice controller waits after a change that was not its own. The kubelet deletes the node's slices whenever it starts;
// they must be back within two seconds. Long enough for the controller's own cache to have caught up with what it wrote itself.
const syncDelay = 500 * time.Millisecond

// How often the API server is asked for its version, since another one may keep other fields; and how soon a layout is looked at again that could not be
// settled.
const (
	versionInterval = 5 * time.Minute
	settleInterval  = 2 * time.Second
)

// publisher writes the node's ResourceSlices while it holds the publisher's turn.
type publisher struct {
	client   kubernetes.Interface
	nodeName string
	turn     *turn
	inv      inventorySource
	// slices cuts what a snapshot offers, for a cluster with such features; mark puts into them what is known of their devices' health. They are not
	// settled if they should be asked again soon.
	slices  func(ctx context.Context, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool)
	mark    func(slices []resourceslice.Slice, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool)
	onError func(ctx context.Context, err error, msg string)
	// onTurn is told when this instance starts and stops to publish, and whether it stops because a newer instance takes over.
	onTurn func(held, superseded bool)
}

// Run publishes until the context ends. changed wakes it when the inventory has changed.
// Nothing is published before the inventory is ready: a driver that comes late leaves the API server as it is.
func (p *publisher) Run(ctx context.Context, changed <-chan struct{}) error {
	logger := klog.FromContext(ctx)
	for ctx.Err() == nil {
		p.untilReady(ctx, changed, nil)
		if err := p.turn.Take(ctx); err != nil {
			return unlessOver(ctx, fmt.Errorf("take the publisher's turn: %w", err))
		}
		p.onTurn(true, false)
		logger.Info("Publishing this node's ResourceSlices", "pool", p.nodeName)
		err := p.publish(ctx, changed)
		p.onTurn(false, err == nil && ctx.Err() == nil)
		p.turn.Release(ctx)
		if err != nil {
			return err
		}
	}
	return nil
}

// unlessOver is err, but nil once the context has ended: then it is that end which the work reports.
func unlessOver(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// untilReady says whether the node got ready before the context ended or something else was wanted.
func (p *publisher) untilReady(ctx context.Context, changed, wanted <-chan struct{}) bool {
	for !p.inv.Snapshot().Ready {
		select {
		case <-ctx.Done():
			return false
		case <-wanted:
			return false
		case <-changed:
		}
	}
	return true
}

// publish runs the slice controller for as long as this instance has the turn.
func (p *publisher) publish(ctx context.Context, changed <-chan struct{}) error {
	logger := klog.FromContext(ctx)
	features, known := p.features(ctx)
	if !known {
		return nil
	}
	var on basis
	var resources []resourceslice.Slice
	settled := false
	for known = false; !known; {
		if !p.untilReady(ctx, changed, p.turn.Wanted()) {
			return nil
		}
		resources, settled, known = p.resources(ctx, &on, features)
	}
	given, published, err := p.first(ctx, resources)
	if err != nil {
		logger.V(2).Info("Could not write the first ResourceSlices; the controller will", "err", err)
	}
	probeAgain, failed := make(chan struct{}, 1), make(chan struct{}, 1)
	stage := begin(given, published, time.Now())
	stage.want(resources)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: DriverName,
		KubeClient: p.client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.nodeName},
		Resources:  p.pool(given),
		SyncDelay:  ptr.To(syncDelay),
		ErrorHandler: func(ctx context.Context, err error, msg string) {
			var dropped *resourceslice.DroppedFieldsError
			if errors.As(err, &dropped) {
				wake(probeAgain) // it is not the server any more that was asked
			}
			wake(failed)
			p.onError(ctx, recoverable(err), msg)
		},
	})
	if err != nil {
		return fmt.Errorf("start the ResourceSlice controller: %w", err)
	}
	defer controller.Stop()
	version := p.serverVersion()
	lookAgain := time.NewTicker(versionInterval)
	defer lookAgain.Stop()
	var again, unsettled <-chan time.Time
	for {
		if !settled && unsettled == nil {
			unsettled = time.After(settleInterval)
		}
		var staged <-chan time.Time
		if stage.waiting() {
			staged = time.After(stagePoll)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.turn.Wanted():
			logger.Info("A newer instance of the plugin takes over publishing")
			return nil
		case <-lookAgain.C:
			if now := p.serverVersion(); now != "" && now != version {
				version = now
				wake(probeAgain)
			}
			continue
		case <-failed:
			stage.failed = time.Now()
			if again == nil {
				again = time.After(publishRetry)
			}
			continue
		case <-again:
			again = nil
			controller.Update(p.pool(stage.given))
			continue
		case <-staged:
			stats := controller.GetStats()
			if next, ok := stage.next(stats.NumCreates+stats.NumUpdates+stats.NumDeletes, time.Now()); ok {
				controller.Update(p.pool(next))
			}
			continue
		case <-probeAgain:
			if features, known = p.features(ctx); !known {
				return nil
			}
		case <-changed:
		case <-unsettled:
		}
		unsettled = nil
		if wanted, ok, known := p.resources(ctx, &on, features); known {
			stage.want(wanted)
			settled = ok
		}
	}
}

// features asks the API server until it answers which fields it keeps: shapes that overlap must not be published to one that drops the counters which
// keep them apart. It is false when the context ends or a newer instance wants the turn.
func (p *publisher) features(ctx context.Context) (_ Features, known bool) {
	pause := time.Second
	for {
		f, err := probeFeatures(ctx, p.client, p.nodeName)
		if err == nil {
			klog.FromContext(ctx).Info("ResourceSlice features that the cluster keeps", "features", f)
			return f, true
		}
		p.onError(ctx, recoverable(err), "Could not find out which ResourceSlice features the cluster keeps; trying again")
		select {
		case <-ctx.Done():
			return Features{}, false
		case <-p.turn.Wanted():
			return Features{}, false
		case <-time.After(pause):
		}
		pause = min(2*pause, 30*time.Second)
	}
}

// serverVersion is empty while the server does not answer.
func (p *publisher) serverVersion() string {
	v, err := p.client.Discovery().ServerVersion()
	if err != nil {
		return ""
	}
	return v.GitVersion
}

// basis is what was last offered: slices without marks, for a cluster with such features, of the snapshot that they were cut from.
type basis struct {
	slices   []resourceslice.Slice
	snapshot inventory.Snapshot
	features Features
	settled  bool
}

// resources are the slices of the node's one pool, with marks. A node that is not ready now keeps what it has offered, since an empty pool would be a claim
// about its GPUs, unless they are known to be gone; how these are is said all the same. It is not known what to publish where a cluster has come to keep other fields meanwhile: shapes that
// overlap may not be cut as they were.
func (p *publisher) resources(ctx context.Context, on *basis, f Features) (_ []resourceslice.Slice, settled, known bool) {
	s := p.inv.Snapshot()
	switch {
	case s.Ready:
		*on = basis{snapshot: s, features: f}
		on.slices, on.settled = p.slices(ctx, s, f)
	case s.Empty:
		*on = basis{snapshot: s, features: f, settled: true}
	case on.features != f:
		return nil, false, false
	}
	marked, settled := p.mark(on.slices, on.snapshot, f)
	return marked, settled && on.settled, true
}

// pool has the slices. The controller compares it with what the API server has and writes only what differs.
func (p *publisher) pool(slices []resourceslice.Slice) *resourceslice.DriverResources {
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.nodeName: {Slices: slices}}}
}

// wake leaves a value in a channel of capacity one.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// recoverableError is an error after which the work goes on: it is logged, counted and retried.
type recoverableError struct{ error }

func (e recoverableError) Unwrap() error { return e.error }

func recoverable(err error) error { return recoverableError{err} }

func isRecoverable(err error) bool {
	var r recoverableError
	return errors.As(err, &r)
}
