package publish

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// foreignTimeout bounds the time for getting a GPU's lock and querying its MIG instances, before
// the plugin chooses how to offer the GPU.
const foreignTimeout = 2 * time.Second

// Ownership tells the MIG instances that this driver created for claims from those that an admin
// created. Package prepare implements it with its checkpoint records of claims.
type Ownership interface {
	// OwnedInstances returns those of the given instances that were created for a claim that still has
	// a checkpoint record.
	OwnedInstances(gpu string, instances []device.Instance) ([]device.Instance, error)
	// ForeignInstances queries the GPU while it holds the GPU's lock. instances are all MIG instances
	// of the GPU. foreign are those of them that no claim's checkpoint record names, so an admin
	// created them.
	ForeignInstances(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance, err error)
	// AllocatedDevices returns the devices that prepared claims have.
	AllocatedDevices() (device.Allocations, error)
}

// Layouts decides how each GPU is offered: whole, in partitions or in shares. It follows the GPU's
// policy, but keeps allocated devices published.
//
// The inventory and the claims' records are read at different times. So a MIG instance that was
// just removed for an ended claim looks as if an admin had created it. Layouts therefore queries
// the GPU again, under its lock, before it decides that an admin partitioned the GPU.
type Layouts struct {
	ownership Ownership
	// policies returns the GPUs' policies. Until they are known the plugin changes no GPU, because
	// they may forbid changes.
	policies func() (_ device.Policies, known bool)
	// The retainer has no lock, so only the goroutine that calls Decide may use it.
	retainer *retainer
	// decided maps each GPU's name to how that GPU was last offered, before any change for allocated
	// devices. The map is replaced and never modified.
	decided atomic.Pointer[map[string]decision]
}

type decision struct {
	offering device.Offering
	reason   string
	foreign  []device.Instance // MIG instances of an admin, confirmed by a query of the GPU
}

// NewLayouts returns Layouts that have decided nothing yet. Until policies are known they must be
// the zero value, which leaves every GPU as it is.
func NewLayouts(ownership Ownership, cluster Cluster, policies func() (_ device.Policies, known bool)) *Layouts {
	l := &Layouts{ownership: ownership, policies: policies, retainer: &retainer{records: ownership, cluster: cluster}}
	l.decided.Store(&map[string]decision{})
	return l
}

// Reset forgets which devices are published. The caller must call it when this plugin instance
// becomes the leader, because another plugin instance may have published since.
func (l *Layouts) Reset() { l.retainer.Reset() }

// Decide returns how each GPU of the snapshot is offered. counters is true if the cluster supports
// shared counters. settled is false if the caller must call Decide again soon. After an error the
// caller must not remove any published device, because it is unknown which are allocated.
func (l *Layouts) Decide(
	ctx context.Context, s inventory.Snapshot, counters bool, build SliceBuilder,
) (_ []device.Offering, settled bool, _ error) {
	offerings, settled := l.decideByPolicy(ctx, s, counters)
	retained, err := l.retainer.Retain(ctx, offerings, counters, build)
	if err != nil {
		return nil, false, err
	}
	return offerings, settled && retained, nil
}

// decideByPolicy returns how the policies offer each GPU, without regard to the devices that claims
// have. settled is false if a GPU's MIG instances could not be determined.
func (l *Layouts) decideByPolicy(
	ctx context.Context, s inventory.Snapshot, counters bool,
) (offerings []device.Offering, settled bool) {
	decisions := make([]decision, len(s.Node.GPUs))
	errs := make([]error, len(s.Node.GPUs))
	policies, _ := l.policies()
	before := *l.decided.Load()
	var wg sync.WaitGroup
	for i, g := range s.Node.GPUs {
		// Each GPU has a goroutine, so that a GPU that does not answer does not delay the queries of the
		// others.
		wg.Go(func() {
			decisions[i], errs[i] = l.decideGPU(ctx, g.GPU, policies.For(g.GPU), counters, before[g.WholeName()])
		})
	}
	wg.Wait()
	settled = true
	logger := klog.FromContext(ctx)
	decided := make(map[string]decision, len(decisions))
	for i, d := range decisions {
		name := s.Node.GPUs[i].WholeName()
		if errs[i] != nil {
			settled = false
			logger.Info("Cannot determine who owns the GPU's MIG instances; retrying", "gpu", name, "err", errs[i])
		}
		if d.reason != before[name].reason {
			logger.Info("Chose how to offer a GPU", "gpu", name, "limitedBecause", d.reason)
		}
		decided[name] = d
		offerings = append(offerings, d.offering)
	}
	l.decided.Store(&decided)
	return offerings, settled
}

// decideGPU returns how the GPU g is offered. before is the last decision about the GPU with this
// name.
func (l *Layouts) decideGPU(
	ctx context.Context, g device.GPU, policy device.Policy, counters bool, before decision,
) (decision, error) {
	var owned, foreign []device.Instance
	var failed error
	if g.MIG != nil && len(g.MIG.Instances) > 0 {
		g, owned, foreign, failed = l.splitInstances(ctx, g, before.foreign)
	}
	if failed != nil && before.offering.UUID == g.UUID {
		return before, failed // if the GPU is locked for too long, it keeps its layout
	}
	layout, reason := device.Decide(g, owned, policy, counters)
	return decision{offering: device.Offering{GPU: g, Layout: layout}, reason: reason, foreign: foreign}, failed
}

// splitInstances sorts g's MIG instances into those created for claims (owned) and those of an
// admin (foreign). If the latter differ from the confirmed ones, it queries the GPU again, and the
// returned GPU has the instances from that query.
func (l *Layouts) splitInstances(
	ctx context.Context, g device.GPU, confirmed []device.Instance,
) (_ device.GPU, owned, foreign []device.Instance, err error) {
	name := g.WholeName()
	owned, err = l.ownership.OwnedInstances(name, g.MIG.Instances)
	if err != nil {
		return g, nil, nil, err
	}
	foreign = subtract(g.MIG.Instances, owned)
	if len(foreign) == 0 || slices.EqualFunc(foreign, confirmed, sameInstance) {
		return g, owned, foreign, nil
	}
	ctx, cancel := context.WithTimeout(ctx, foreignTimeout)
	defer cancel()
	instances, foreign, err := l.ownership.ForeignInstances(ctx, g.Card(), name)
	if err != nil {
		return g, owned, nil, err
	}
	now := *g.MIG
	now.Instances = instances
	g.MIG = &now
	return g, subtract(instances, foreign), foreign, nil
}

// Limited returns why GPUs are not offered as their policies want. The keys are the names of these
// GPUs.
func (l *Layouts) Limited() map[string]string {
	limited := map[string]string{}
	for name, d := range *l.decided.Load() {
		if d.reason != "" {
			limited[name] = d.reason
		}
	}
	return limited
}

// HandedOver returns the GPUs that have MIG instances of an admin although their policy is adopt,
// under which the plugin removes such instances when they are idle.
func (l *Layouts) HandedOver() []device.GPU {
	return l.gpusWhere(func(d decision, p device.Policy) bool { return len(d.foreign) > 0 && p.Mode == device.PolicyAdopt })
}

// MIGModeUnneeded returns the GPUs in MIG mode whose policy creates no partitions. It returns no
// GPU before the policies are known.
func (l *Layouts) MIGModeUnneeded() []device.GPU {
	return l.gpusWhere(func(d decision, p device.Policy) bool {
		return d.offering.MIG != nil && d.offering.MIG.Enabled && !p.CreatesInstances()
	})
}

// gpusWhere returns the GPUs for which the function is returns true, called with the last decision
// and with the policy that takes effect. It returns no GPU before the policies are known.
func (l *Layouts) gpusWhere(is func(decision, device.Policy) bool) []device.GPU {
	policies, known := l.policies()
	if !known {
		return nil
	}
	var gpus []device.GPU
	for _, d := range *l.decided.Load() {
		g := d.offering.GPU
		if policy, _ := policies.For(g).On(g); is(d, policy) {
			gpus = append(gpus, g)
		}
	}
	return gpus
}

// Count returns numbers for the metrics: the MIG devices created for claims (owned) and those of an
// admin (foreign), both by profile, and the MIG-capable GPUs by the reason why less is offered than
// their policy wants.
func (l *Layouts) Count() (owned, foreign, gpus map[string]int) {
	owned, foreign, gpus = map[string]int{}, map[string]int{}, map[string]int{}
	for _, d := range *l.decided.Load() {
		m := d.offering.MIG
		if m == nil {
			continue
		}
		gpus[d.reason]++
		for _, i := range d.foreign {
			for _, c := range i.Compute {
				foreign[c.Name]++
			}
		}
		for _, i := range subtract(m.Instances, d.foreign) {
			for _, c := range i.Compute {
				owned[c.Name]++
			}
		}
	}
	return owned, foreign, gpus
}

// subtract returns the MIG instances in the first list that are not in the second.
func subtract(all, some []device.Instance) []device.Instance {
	var rest []device.Instance
	for _, i := range all {
		if !slices.ContainsFunc(some, func(o device.Instance) bool { return sameInstance(i, o) }) {
			rest = append(rest, i)
		}
	}
	return rest
}

// sameInstance reports whether a and b are the same MIG instance. It ignores the capability device
// nodes, which follow from the other fields.
func sameInstance(a, b device.Instance) bool {
	return a.ID == b.ID && a.ProfileID == b.ProfileID && a.Placement == b.Placement &&
		slices.EqualFunc(a.Compute, b.Compute, func(a, b device.ComputeInstance) bool { return a.ID == b.ID && a.UUID == b.UUID })
}
