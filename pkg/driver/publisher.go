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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

// syncDelay is how long the slice controller waits after someone else has changed its slices, so
// that its cache has caught up with its own writes. The pause must be short: the kubelet deletes
// the node's slices when it starts, and they must be back within two seconds.
const syncDelay = 500 * time.Millisecond

// versionInterval is how often the publisher reads the API server's version, because another
// version may keep other fields. settleInterval is the first pause before it builds slices again
// that are not settled. The pause grows to settleIntervalMax.
const (
	versionInterval   = 5 * time.Minute
	settleInterval    = 2 * time.Second
	settleIntervalMax = 10 * time.Second
	// apiTimeout limits each call of the publisher to the API server. A healthy API server answers at
	// once.
	apiTimeout = 10 * time.Second
)

// publisher writes the node's ResourceSlices while this plugin instance is the leader.
type publisher struct {
	client   kubernetes.Interface
	nodeName string
	leader   *leaderLock
	inv      inventorySource
	// slices builds the ResourceSlices of the snapshot s for a cluster with the features f. It returns
	// an error if the plugin cannot find out which devices are allocated. settled is false if the
	// publisher must call slices again soon.
	slices func(ctx context.Context, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool, _ error)
	// mark adds taints for the devices' health and the node's readiness to the slices. settled is
	// false if the publisher must call mark again soon.
	mark    func(slices []resourceslice.Slice, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool)
	onError func(ctx context.Context, err error, msg string)
	// conditionsDue says whether the slices must show that the node is not ready. due is true if they
	// must show it now, pending if they must show it later unless the condition ends.
	conditionsDue func(now time.Time) (due, pending bool)
	// onLeadership is called when this plugin instance becomes the leader and when it stops being the
	// leader. newerLeads is true if a newer instance takes over.
	onLeadership func(leading, newerLeads bool)
	// onVersion is called with the API server's version at the start and after each change.
	onVersion func(version string)
	// lastFeatures is the result of the last successful probe.
	lastFeatures *Features
}

// Run publishes slices until the context ends. A signal on changed tells that the slices may have
// to change. While the node is not ready, Run only updates the taints of slices that an earlier
// plugin instance published.
func (p *publisher) Run(ctx context.Context, changed <-chan struct{}) error {
	p.waitForContent(ctx, changed)
	for ctx.Err() == nil {
		// When a newer plugin instance that took over has ended, this one becomes the leader again even
		// if the node is not ready. The reason may be a missing CDI hook, which only a leader installs.
		if err := p.leader.Acquire(ctx); err != nil {
			return unlessDone(ctx, fmt.Errorf("acquire the leader lock: %w", err))
		}
		p.onLeadership(true, false)
		klog.FromContext(ctx).Info("Publishing this node's ResourceSlices", "pool", p.nodeName)
		leading, stop := p.leaderContext(ctx)
		err := p.publish(leading, changed)
		stop()
		p.onLeadership(false, err == nil && ctx.Err() == nil)
		p.leader.Release(ctx)
		if err != nil {
			return err
		}
	}
	return nil
}

// leaderContext returns a context that ends when a newer plugin instance asks to lead. This also
// cancels running calls to the API server.
func (p *publisher) leaderContext(ctx context.Context) (context.Context, context.CancelFunc) {
	leading, stop := context.WithCancel(ctx)
	go func() {
		select {
		case <-leading.Done():
		case <-p.leader.HandoverRequested():
			klog.FromContext(ctx).Info("Handing over to a newer instance of the plugin")
			stop()
		}
	}()
	return leading, stop
}

// unlessDone returns err, or nil if the context has ended.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// waitForContent waits until the node is ready and returns no slices. If the node stays not ready
// for so long that a taint must say so, it instead returns the slices of an earlier plugin
// instance, which need that taint. ok is false if the context ended.
func (p *publisher) waitForContent(ctx context.Context, changed <-chan struct{}) (adopted []resourceslice.Slice, ok bool) {
	pause := settleInterval
	for !p.inv.Snapshot().Ready {
		var again <-chan time.Time
		due, pending := p.conditionsDue(time.Now())
		switch {
		case due:
			adopted, err := p.adoptSlices(ctx)
			if len(adopted) > 0 {
				return adopted, true
			}
			if err != nil && ctx.Err() == nil {
				p.onError(ctx, recoverable(err), "Failed to list the ResourceSlices of an earlier instance; retrying")
				again = time.After(pause)
				pause = min(2*pause, publishRetryMax)
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

// waitForFeatures asks the API server which fields it keeps, until there is an answer. Without the
// answer the publisher could publish a whole GPU and its partitions to a server that drops the
// counters between them. known is false if the context ended.
func (p *publisher) waitForFeatures(ctx context.Context) (_ Features, known bool) {
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

// probe asks the API server once which fields it keeps. After a failure it reports the error, and
// ok is false.
func (p *publisher) probe(ctx context.Context) (_ Features, ok bool) {
	callCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	f, rejected, err := probeFeatures(callCtx, p.client, p.nodeName)
	if err == nil {
		logFeatures(ctx, p.lastFeatures, f, rejected)
		p.lastFeatures = &f
		return f, true
	}
	if ctx.Err() == nil {
		p.onError(ctx, recoverable(probeError{err}), "Failed to probe the ResourceSlice features of the cluster; retrying")
	}
	return Features{}, false
}

// watchVersion reads the API server's version every versionInterval until the context ends. After a
// change it signals versionChanged.
func (p *publisher) watchVersion(ctx context.Context, versionChanged chan<- struct{}) {
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
			wake(versionChanged)
		}
	}
}

// serverVersion returns the API server's version, or "" while the server does not answer.
func (p *publisher) serverVersion(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	v, err := p.client.Discovery().ServerVersionWithContext(ctx)
	if err != nil {
		return ""
	}
	return v.GitVersion
}

// lastOffer has the slices that were built last, without taints, and the snapshot and features from
// which they were built. Slices of an earlier plugin instance keep their taints. The snapshot is
// empty until the hardware is known.
type lastOffer struct {
	// valid is false until slices were built or taken over from an earlier plugin instance.
	valid    bool
	slices   []encodedSlice
	snapshot inventory.Snapshot
	features Features
	settled  bool
}

// buildSlices returns the slices to publish, with taints. If the node is not ready, it returns the
// last slices with a taint, because an empty pool would mean that the GPUs are gone. known is false
// if there are no last slices then, or if they were built for other features.
func (p *publisher) buildSlices(
	ctx context.Context, last *lastOffer, f Features,
) (_ []resourceslice.Slice, settled, known bool, _ error) {
	s := p.inv.Snapshot()
	if !s.Ready && !s.Empty && (!last.valid || last.features != f) {
		return nil, false, false, nil
	}
	offered, err := p.refreshOffer(ctx, last, s, f)
	if err != nil {
		return nil, false, false, err
	}
	marked, settled := p.mark(offered, last.snapshot, f)
	return marked, settled && last.settled, true, nil
}

// refreshOffer returns the slices to publish, without new taints. If the node is ready, it builds
// them from the snapshot s and stores them in last. If the inventory says that the node has no GPU,
// there are none. Otherwise it returns the slices in last.
func (p *publisher) refreshOffer(
	ctx context.Context, last *lastOffer, s inventory.Snapshot, f Features,
) (offered []resourceslice.Slice, err error) {
	switch {
	case s.Ready:
		offered, settled, err := p.slices(ctx, s, f)
		if err != nil {
			return p.keepOffer(ctx, last, s, f, err)
		}
		encoded, err := encodeSlices(offered)
		if err != nil {
			return nil, err
		}
		*last = lastOffer{valid: true, slices: encoded, snapshot: s, features: f, settled: settled}
		return offered, nil
	case s.Empty:
		*last = lastOffer{valid: true, snapshot: s, features: f, settled: true}
	case s.Known && !last.snapshot.Known:
		last.snapshot = s
	}
	return decodeSlices(last.slices)
}

// keepOffer returns the slices in last, or those of an earlier plugin instance, because new ones
// could not be built. reason is the error that prevented it. If there are no earlier slices for the
// features f, keepOffer returns reason.
func (p *publisher) keepOffer(
	ctx context.Context, last *lastOffer, s inventory.Snapshot, f Features, reason error,
) (offered []resourceslice.Slice, err error) {
	if !last.valid {
		adopted, err := p.adoptSlices(ctx)
		if err == nil {
			*last, err = adoptedOffer(adopted, f)
		}
		if err != nil {
			return nil, errors.Join(reason, err)
		}
		last.snapshot = s
	}
	last.settled = false
	if !last.valid || last.features != f {
		return nil, reason
	}
	p.onError(ctx, recoverable(reason), "Failed to read allocated devices; keeping the published ResourceSlices")
	return decodeSlices(last.slices)
}

// driverResources returns the slices in the form that the slice controller takes. The controller
// writes only slices that differ from those in the API server.
func (p *publisher) driverResources(slices []resourceslice.Slice) *resourceslice.DriverResources {
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.nodeName: {Slices: slices}}}
}

// wake signals c, a channel of capacity one. It does not block if a signal is already in the
// channel.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// recoverableError marks an error of a background goroutine that is logged, counted and retried.
type recoverableError struct{ error }

func (e recoverableError) Unwrap() error { return e.error }

func recoverable(err error) error { return recoverableError{err} }

func isRecoverable(err error) bool {
	var r recoverableError
	return errors.As(err, &r)
}

// offered returns what the node offers, for the publisher.
type offered struct{ node *nodeview.Node }

func (o offered) Snapshot() inventory.Snapshot { return o.node.Refresh().Offered }
