package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// syncDelay is how long the slice controller waits after a change that was not its own. The kubelet deletes the node's slices whenever it starts;
// they must be back within two seconds. Long enough for the controller's own cache to have caught up with what it wrote itself.
const syncDelay = 500 * time.Millisecond

// How often the API server is asked for its version, since another one may keep other fields; and
// how soon, and in the end how seldom, a layout is looked at again that could not be settled.
const (
	versionInterval = 5 * time.Minute
	settleInterval  = 2 * time.Second
	settleSeldom    = 10 * time.Second
	// askTimeout bounds what is asked before anything is published, and beside that: an API server that is there answers at once.
	askTimeout = 10 * time.Second
)

// publisher writes the node's ResourceSlices while it holds the publisher's turn.
type publisher struct {
	client   kubernetes.Interface
	nodeName string
	turn     *turn
	inv      inventorySource
	// slices cuts what a snapshot offers, for a cluster with such features. On an error nobody
	// knows what claims hold. mark puts into slices what is known of their devices' health. Neither
	// is settled if it should be asked again soon.
	slices  func(ctx context.Context, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool, _ error)
	mark    func(slices []resourceslice.Slice, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool)
	onError func(ctx context.Context, err error, msg string)
	// due says whether slices have to show that the node is not ready, now or if it stays so.
	due func(now time.Time) (due, pending bool)
	// onTurn is told when this instance starts and stops to publish, and whether it stops because a newer instance takes over.
	onTurn func(held, superseded bool)
	// onVersion gets the API server's version, now and then.
	onVersion func(version string)
	// probed is what the API server was last found to keep.
	probed *Features
}

// Run publishes until the context ends. changed wakes it when the inventory has changed.
// Before the node is ready nothing new is published, but slices of an earlier instance are marked.
func (p *publisher) Run(ctx context.Context, changed <-chan struct{}) error {
	p.untilWanted(ctx, changed)
	for ctx.Err() == nil {
		// An instance that has yielded leads again as soon as the newer one is gone, ready or not:
		// only a leader may install the hook that it may lack.
		if err := p.turn.Take(ctx); err != nil {
			return unlessOver(ctx, fmt.Errorf("take the publisher's turn: %w", err))
		}
		p.onTurn(true, false)
		klog.FromContext(ctx).Info("Publishing this node's ResourceSlices", "pool", p.nodeName)
		holding, yield := p.holding(ctx)
		err := p.publish(holding, changed)
		yield()
		p.onTurn(false, err == nil && ctx.Err() == nil)
		p.turn.Release(ctx)
		if err != nil {
			return err
		}
	}
	return nil
}

// holding is a context that ends when a newer instance wants the turn: whatever the API server is being asked then is given up.
func (p *publisher) holding(ctx context.Context) (context.Context, context.CancelFunc) {
	holding, yield := context.WithCancel(ctx)
	go func() {
		select {
		case <-holding.Done():
		case <-p.turn.Wanted():
			klog.FromContext(ctx).Info("A newer instance of the plugin takes over publishing")
			yield()
		}
	}()
	return holding, yield
}

// unlessOver is err, but nil once the context has ended: then it is that end which the work reports.
func unlessOver(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// untilWanted waits until there is something to publish: the node is ready, or it is known not to be
// and has the slices of an earlier instance, which it returns. It is false if the context ended first.
func (p *publisher) untilWanted(ctx context.Context, changed <-chan struct{}) (adopted []resourceslice.Slice, ok bool) {
	pause := settleInterval
	for !p.inv.Snapshot().Ready {
		var again <-chan time.Time
		due, pending := p.due(time.Now())
		switch {
		case due:
			adopted, err := p.adopt(ctx)
			if len(adopted) > 0 {
				return adopted, true
			}
			if err != nil && ctx.Err() == nil {
				p.onError(ctx, recoverable(err), "Failed to list the ResourceSlices of an earlier instance; retrying")
				again = time.After(pause)
				pause = min(2*pause, publishRetryMost)
			}
		case pending:
			again = time.After(settleInterval)
		}
		select {
		case <-ctx.Done():
			return nil, false
		case <-changed:
		case <-again:
		}
	}
	return nil, true
}

// features asks the API server until it answers which fields it keeps: shapes that overlap must not be published to one that drops the counters which
// keep them apart. It is false when the context ends.
func (p *publisher) features(ctx context.Context) (_ Features, known bool) {
	pause := time.Second
	for {
		if f, ok := p.probe(ctx); ok {
			return f, true
		}
		select {
		case <-ctx.Done():
			return Features{}, false
		case <-time.After(pause):
		}
		pause = min(2*pause, 30*time.Second)
	}
}

// probe asks once, and reports an answer that is none.
func (p *publisher) probe(ctx context.Context) (_ Features, ok bool) {
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	f, rejected, err := probeFeatures(asking, p.client, p.nodeName)
	if err == nil {
		logFeatures(ctx, p.probed, f, rejected)
		p.probed = &f
		return f, true
	}
	if ctx.Err() == nil {
		p.onError(ctx, recoverable(probeError{err}), "Could not find out which ResourceSlice features the cluster keeps; trying again")
	}
	return Features{}, false
}

// followVersion asks the API server regularly for its version until the context ends, and wakes who has to know that it is another one.
func (p *publisher) followVersion(ctx context.Context, another chan<- struct{}) {
	version := p.serverVersion(ctx)
	p.onVersion(version)
	tick := time.NewTicker(versionInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := p.serverVersion(ctx); now != "" && now != version {
			version = now
			p.onVersion(version)
			wake(another)
		}
	}
}

// serverVersion is empty while the server does not answer.
func (p *publisher) serverVersion(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	v, err := p.client.Discovery().ServerVersionWithContext(ctx)
	if err != nil {
		return ""
	}
	return v.GitVersion
}

// basis is what was last offered: slices without marks, for a cluster with such features, of the
// snapshot that they were cut from. Slices of an earlier instance have its marks, and the snapshot
// is empty until the hardware is known.
type basis struct {
	// made is false before anything was offered.
	made     bool
	slices   []keptSlice
	snapshot inventory.Snapshot
	features Features
	settled  bool
}

// resources are the slices of the node's one pool, with marks. A node that is not ready now keeps
// what it has offered, since an empty pool would be a claim about its GPUs, unless they are known
// to be gone; the marks say that it is not ready. Neither does anything but marks change while
// nobody knows what claims hold. It is not known what to publish where a cluster has come to keep
// other fields meanwhile: shapes that overlap may not be cut as they were.
func (p *publisher) resources(ctx context.Context, on *basis, f Features) (_ []resourceslice.Slice, settled, known bool, _ error) {
	s := p.inv.Snapshot()
	if !s.Ready && !s.Empty && (!on.made || on.features != f) {
		return nil, false, false, nil
	}
	offered, err := p.offered(ctx, on, s, f)
	if err != nil {
		return nil, false, false, err
	}
	marked, settled := p.mark(offered, on.snapshot, f)
	return marked, settled && on.settled, true, nil
}

// offered are the slices without marks, and what is remembered of them.
func (p *publisher) offered(ctx context.Context, on *basis, s inventory.Snapshot, f Features) (offered []resourceslice.Slice, err error) {
	switch {
	case s.Ready:
		offered, settled, err := p.slices(ctx, s, f)
		if err != nil {
			return p.unchanged(ctx, on, s, f, err)
		}
		kept, err := keep(offered)
		if err != nil {
			return nil, err
		}
		*on = basis{made: true, slices: kept, snapshot: s, features: f, settled: settled}
		return offered, nil
	case s.Empty:
		*on = basis{made: true, snapshot: s, features: f, settled: true}
	case s.Known && !on.snapshot.Known:
		on.snapshot = s
	}
	return unkeep(on.slices)
}

// unchanged are the slices as they are published. For some reason nobody knows what claims hold of
// them.
func (p *publisher) unchanged(
	ctx context.Context, on *basis, s inventory.Snapshot, f Features, reason error,
) (offered []resourceslice.Slice, err error) {
	if !on.made {
		adopted, err := p.adopt(ctx)
		if err == nil {
			*on, err = adoptedBasis(adopted, f)
		}
		if err != nil {
			return nil, errors.Join(reason, err)
		}
		on.snapshot = s
	}
	on.settled = false
	if !on.made || on.features != f {
		return nil, reason
	}
	p.onError(ctx, recoverable(reason), "Failed to find out which devices claims hold; the ResourceSlices keep their devices until that is known")
	return unkeep(on.slices)
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
