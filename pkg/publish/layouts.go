package publish

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// confirmTimeout bounds how long a GPU that a claim is being prepared on is waited for before its
// layout is decided.
const confirmTimeout = 2 * time.Second

// Ownership tells what claims hold from what an admin made. Package prepare has the records.
type Ownership interface {
	// Explained is the part of the instances that records explain.
	Explained(gpu string, instances []device.Instance) ([]device.Instance, error)
	// Foreign looks at the card itself, while no claim is being prepared on it, and says what is
	// there, and what of it no record explains.
	Foreign(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance, err error)
	// HeldAlone are the devices that one claim holds, by name, with the claim's UID.
	HeldAlone() (map[string]string, error)
	// HeldShares are the devices of which claims hold shares, and whether these are fractions.
	HeldShares() (map[string]bool, error)
}

// Layouts decides in which shapes each GPU is offered: as its policy wants, but for what claims
// hold.
//
// What the inventory saw and what the records say are of two moments: an instance that was removed
// in between looks like one that nobody knows. So before a GPU is taken for an admin's, the card
// itself is asked, under its lock.
type Layouts struct {
	owner Ownership
	// keeper is the publisher's alone.
	keeper *keeper

	mu sync.Mutex
	// configured and annotated are the rules of the configuration, and of the Node's annotation,
	// which go first.
	configured, annotated device.Policies
	// read says that the Node's annotation is known. Until then nothing is changed about any GPU:
	// it may say so.
	read bool
	// decided is what was last said of each GPU, by its name.
	decided map[string]decision
}

type decision struct {
	offering device.Offering
	reason   string
	foreign  []device.Instance // as confirmed
}

// NewLayouts decides by the rules of the configuration.
func NewLayouts(owner Ownership, cluster Cluster, configured device.Policies) *Layouts {
	return &Layouts{
		owner: owner, keeper: &keeper{records: owner, cluster: cluster},
		configured: configured, decided: map[string]decision{},
	}
}

// Begin is to be called when this instance begins to publish: another one may have done so before.
func (l *Layouts) Begin() { l.keeper.Begin() }

// Annotate sets the rules of the Node's annotation.
func (l *Layouts) Annotate(p device.Policies) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.annotated, l.read = p, true
}

// policies are the rules as they are now.
func (l *Layouts) policies() func(device.GPU) device.Policy {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.read {
		return device.Policies{}.For
	}
	return l.configured.And(l.annotated).For
}

// Decide says how each GPU of the snapshot is offered, to a cluster that keeps counters or not. It
// is settled if it need not be asked again soon. On an error only what is published may be offered,
// because nobody knows what claims hold of it. One goroutine calls it at a time.
func (l *Layouts) Decide(
	ctx context.Context, s inventory.Snapshot, counters bool, cut Cut,
) (_ []device.Offering, settled bool, _ error) {
	offerings, settled := l.byPolicy(ctx, s, counters)
	kept, err := l.keeper.Keep(ctx, offerings, counters, cut)
	if err != nil {
		return nil, false, err
	}
	return offerings, settled && kept, nil
}

// byPolicy says how each GPU would be offered if no claim held anything.
func (l *Layouts) byPolicy(ctx context.Context, s inventory.Snapshot, counters bool) (offerings []device.Offering, settled bool) {
	decisions := make([]decision, len(s.Node.GPUs))
	errs := make([]error, len(s.Node.GPUs))
	policy := l.policies()
	var wg sync.WaitGroup
	for i, g := range s.Node.GPUs {
		wg.Go(func() { decisions[i], errs[i] = l.decide(ctx, g.GPU, policy(g.GPU), counters) }) // a GPU that hangs keeps no other waiting
	}
	wg.Wait()
	settled = true
	logger := klog.FromContext(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.decided
	l.decided = make(map[string]decision, len(decisions))
	for i, d := range decisions {
		name := s.Node.GPUs[i].WholeName()
		if errs[i] != nil {
			settled = false
			logger.Info("Whose the instances of a GPU are cannot be told now; trying again", "gpu", name, "err", errs[i])
		}
		if d.reason != before[name].reason {
			logger.Info("Shapes in which a GPU is offered", "gpu", name, "limited", d.reason)
		}
		l.decided[name] = d
		offerings = append(offerings, d.offering)
	}
	return offerings, settled
}

func (l *Layouts) decide(ctx context.Context, g device.GPU, policy device.Policy, counters bool) (decision, error) {
	var owned []device.Instance
	var foreign []device.Instance
	var failed error
	if g.MIG != nil && len(g.MIG.Instances) > 0 {
		g, owned, foreign, failed = l.split(ctx, g)
	}
	if before, known := l.before(g); failed != nil && known {
		return before, failed // a GPU that is busy being cut is not taken away for that
	}
	layout, reason := device.Decide(g, owned, policy, counters)
	return decision{offering: device.Offering{GPU: g, Layout: layout}, reason: reason, foreign: foreign}, failed
}

// before is what was last decided about this card.
func (l *Layouts) before(g device.GPU) (_ decision, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d, known := l.decided[g.WholeName()]
	return d, known && d.offering.UUID == g.UUID
}

// split tells a GPU's instances apart, and brings them up to date where that was needed. On an
// error what nobody explains counts as an admin's: then nothing is offered that may not be there.
func (l *Layouts) split(ctx context.Context, g device.GPU) (_ device.GPU, owned, foreign []device.Instance, err error) {
	name := g.WholeName()
	owned, err = l.owner.Explained(name, g.MIG.Instances)
	if err != nil {
		return g, nil, nil, err
	}
	foreign = without(g.MIG.Instances, owned)
	if len(foreign) == 0 || l.confirmed(name, foreign) {
		return g, owned, foreign, nil
	}
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	there, confirmed, err := l.owner.Foreign(ctx, g.Card(), name)
	if err != nil {
		return g, owned, nil, err
	}
	now := *g.MIG
	now.Instances = there
	g.MIG = &now
	return g, without(there, confirmed), confirmed, nil
}

// confirmed says whether exactly these instances were seen to be an admin's before.
func (l *Layouts) confirmed(gpu string, foreign []device.Instance) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.EqualFunc(foreign, l.decided[gpu].foreign, sameInstance)
}

// Limited says for each GPU that is not offered as its policy wants why, by the GPU's name.
func (l *Layouts) Limited() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	limited := map[string]string{}
	for name, d := range l.decided {
		if d.reason != "" {
			limited[name] = d.reason
		}
	}
	return limited
}

// HandedOver are the GPUs with instances of an admin who hands them over.
func (l *Layouts) HandedOver() []device.GPU {
	policy := l.policies()
	l.mu.Lock()
	defer l.mu.Unlock()
	var gpus []device.GPU
	for _, d := range l.decided {
		g := d.offering.GPU
		if holds, _ := policy(g).On(g); len(d.foreign) > 0 && holds.Mode == device.PolicyAdopt {
			gpus = append(gpus, g)
		}
	}
	return gpus
}

// Uncut are the GPUs in MIG mode whose policy lets nothing be cut. While the Node's annotation is
// not known, there are none.
func (l *Layouts) Uncut() []device.GPU {
	policy := l.policies()
	l.mu.Lock()
	defer l.mu.Unlock()
	var gpus []device.GPU
	for _, d := range l.decided {
		g := d.offering.GPU
		if holds, _ := policy(g).On(g); l.read && g.MIG != nil && g.MIG.Enabled && !holds.Cuts() {
			gpus = append(gpus, g)
		}
	}
	return gpus
}

// Count is how many MIG devices there are of each profile, by whose they are, and how many GPUs
// that can be cut there are, by why they are not offered as their policy wants.
func (l *Layouts) Count() (ours, foreign, gpus map[string]int) {
	ours, foreign, gpus = map[string]int{}, map[string]int{}, map[string]int{}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.decided {
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
		for _, i := range without(m.Instances, d.foreign) {
			for _, c := range i.Compute {
				ours[c.Name]++
			}
		}
	}
	return ours, foreign, gpus
}

// without is what of all is not in some.
func without(all, some []device.Instance) []device.Instance {
	var rest []device.Instance
	for _, i := range all {
		if !slices.ContainsFunc(some, func(o device.Instance) bool { return sameInstance(i, o) }) {
			rest = append(rest, i)
		}
	}
	return rest
}

// sameInstance leaves the capability nodes out: they follow from the rest.
func sameInstance(a, b device.Instance) bool {
	return a.ID == b.ID && a.ProfileID == b.ProfileID && a.Placement == b.Placement &&
		slices.EqualFunc(a.Compute, b.Compute, func(a, b device.ComputeInstance) bool { return a.ID == b.ID && a.UUID == b.UUID })
}
