package publish

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/wake"
)

// Options has what a Publisher needs.
type Options struct {
	Client   kubernetes.Interface
	NodeName string
	Leader   *leader.Lock
	// Shares are the configured share rules, until SetSettings.
	Shares device.ShareRules
	// Effects are the configured taint effects by health state, until SetSettings.
	Effects health.Effects
	// RequireValidation taints a GPU that comes, or comes back after a reset, until a check has
	// passed.
	RequireValidation bool

	Node    *nodeview.Node
	Health  Health
	Claims  Ownership
	Events  Events
	Metrics *metrics.Metrics
}

// Health has the health verdicts on the node's devices.
type Health interface {
	// View returns the verdicts now.
	View() *health.View
	// Changed returns a channel that is closed at the next change of View.
	Changed() <-chan struct{}
	// SetLeader says whether this plugin instance is the leader. Only the leader saves verdicts.
	SetLeader(is bool)
}

// Events writes Events on the Node.
type Events interface {
	Event(reason events.Reason, message string)
	// EventOnChange writes an Event when the state changes to one that is not empty.
	EventOnChange(reason events.Reason, state, message string)
}

// Publisher writes the node's ResourceSlices while this plugin instance is the leader.
type Publisher struct {
	opts    Options
	cluster Cluster
	layouts *Layouts
	// nodeUID is the UID of the Node, which owns the slices. It is empty while the Node is unknown or
	// gone. Then the slice controller waits for a Node before it writes.
	nodeUID atomic.Pointer[types.UID]
	// rebuild says that the slices must be built again, because a policy, the Node's UID or the API
	// server's version has changed, or a claim ended.
	rebuild wake.Signal
	// slices has the slices to publish now, with their taints. It is nil while this instance does not
	// publish. The slices are never modified.
	slices atomic.Pointer[[]resourceslice.Slice]
	// shares are the configured share rules, and effects the configured taint effects by health state.
	shares  atomic.Pointer[device.ShareRules]
	effects atomic.Pointer[health.Effects]
	// server is the API server's last known version. It is nil until then.
	server atomic.Pointer[string]
	// delayed is true while a GPU cannot be offered as configured, because prepared or allocated
	// claims still need its present shape.
	delayed atomic.Bool
	// offersFractions is what OffersFractions returns.
	offersFractions atomic.Bool
	// lastFeatures is the result of the last successful probe.
	lastFeatures *Features
}

// New returns a Publisher, which publishes nothing before Run.
func New(o Options) *Publisher {
	cluster := APIServer{Client: o.Client, Node: o.NodeName}
	p := &Publisher{
		opts: o, cluster: cluster, rebuild: wake.New(), layouts: NewLayouts(o.Claims, cluster, o.Node.Policies),
	}
	p.shares.Store(&o.Shares)
	p.effects.Store(&o.Effects)
	p.nodeUID.Store(new(types.UID))
	return p
}

// ClaimEnded tells the publisher that a claim was unprepared, which a change may wait for.
func (p *Publisher) ClaimEnded() {
	if p.delayed.Load() {
		p.rebuild.Wake()
	}
}

// SetSettings sets the configured share rules and taint effects. Devices that claims hold stay
// published as they are.
func (p *Publisher) SetSettings(shares device.ShareRules, effects health.Effects) {
	p.shares.Store(&shares)
	p.effects.Store(&effects)
	p.Rebuild()
}

// SetNodeUID sets the UID of the Node, to which the slices belong. It is empty while there is no
// Node.
func (p *Publisher) SetNodeUID(uid types.UID) {
	if *p.nodeUID.Swap(&uid) != uid {
		p.rebuild.Wake()
	}
}

// Rebuild makes the publisher build the slices again, because the node's policies have changed.
func (p *Publisher) Rebuild() { p.rebuild.Wake() }

// HandedOver returns the GPUs that have MIG instances of an admin although their policy is adopt.
func (p *Publisher) HandedOver() []device.GPU { return p.layouts.HandedOver() }

// MIGModeUnneeded returns the GPUs in MIG mode whose policy creates no partitions.
func (p *Publisher) MIGModeUnneeded() []device.GPU { return p.layouts.MIGModeUnneeded() }

// OffersFractions reports whether the node offers MPS shares with a limited part of a GPU's memory
// and compute units.
func (p *Publisher) OffersFractions() bool { return p.offersFractions.Load() }

// Slices returns the node's slices with their taints. ok is false if this plugin instance does not
// publish slices. The caller must not modify them.
func (p *Publisher) Slices() (_ []resourceslice.Slice, ok bool) {
	if s := p.slices.Load(); s != nil {
		return *s, true
	}
	return nil, false
}

// Run publishes slices until the context ends. While the node is not ready, Run only updates the
// taints of slices that were published before.
func (p *Publisher) Run(ctx context.Context) error {
	p.waitForContent(ctx)
	for ctx.Err() == nil {
		// When a newer plugin instance that took over has ended, this one becomes the leader again even
		// if the node is not ready. The reason may be a missing CDI hook, which only a leader installs.
		leading, err := p.opts.Leader.Acquire(ctx)
		if err != nil {
			return unlessDone(ctx, fmt.Errorf("acquire the leader lock: %w", err))
		}
		p.setLeader(true)
		p.layouts.Reset() // another plugin instance may have published since
		klog.FromContext(ctx).Info("Publishing this node's ResourceSlices", "pool", p.opts.NodeName)
		err = p.publish(leading)
		p.slices.Store(nil)
		p.setLeader(false)
		p.opts.Leader.Release(ctx)
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *Publisher) setLeader(is bool) {
	p.opts.Metrics.Publisher(is)
	p.opts.Health.SetLeader(is)
}

// waitForContent waits until the node is ready and returns no slices. If the node stays not ready
// for so long that a taint must say so, it instead returns the slices of an earlier plugin
// instance, which need that taint. ok is false if the context ended.
func (p *Publisher) waitForContent(ctx context.Context) (adopted []resourceslice.Slice, ok bool) {
	retries := apiRetries()
	for {
		view := p.opts.Node.View()
		if view.Offered.Ready {
			return nil, true
		}
		var again <-chan time.Time
		due, pending := view.Due(time.Now())
		switch {
		case due:
			adopted, err := p.adoptSlices(ctx)
			if len(adopted) > 0 {
				return adopted, true
			}
			if err != nil && ctx.Err() == nil {
				p.reportError(ctx, err, "Failed to list the ResourceSlices of an earlier instance; retrying")
				again = time.After(retries.Step())
			}
		case pending:
			again = time.After(settleInterval)
		}
		select {
		case <-ctx.Done():
			return nil, false
		case <-view.Changed():
		case <-again:
		}
	}
}

// unlessDone returns err, or nil if the context has ended.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}
