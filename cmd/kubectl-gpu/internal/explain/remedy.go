package explain

import (
	"cmp"
	"context"
	"slices"
	"sort"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// nodesTried is how many nodes are searched for remedies: those that seem to need the fewest
	// changes.
	nodesTried = 4
	// remediesPatience is how long the search for remedies may take on all nodes together. What was
	// not tried by then is not named.
	remediesPatience = 3 * time.Second
	// remediesShown is how many remedies a report has at most.
	remediesShown = 5
)

// remedies returns sets of changes that make the claims fit, at most one of each kind.
func (e *Explainer) remedies(ctx context.Context, q question, nodes []Node, base scenario) []Remedy {
	ctx, cancel := context.WithTimeout(ctx, remediesPatience)
	defer cancel()
	var candidates []*Node
	for i := range nodes {
		n := &nodes[i]
		if n.closed || n.Fits {
			continue
		}
		candidates = append(candidates, n)
	}
	slices.SortStableFunc(candidates, func(a, b *Node) int { return cmp.Compare(a.cost, b.cost) })
	var found []Remedy
	for _, c := range candidates[:min(nodesTried, len(candidates))] {
		n := e.node(ctx, q, c.node, base)
		for _, r := range e.remediesOn(ctx, q, &n, base) {
			same := slices.IndexFunc(found, func(o Remedy) bool { return slices.Equal(kinds(o), kinds(r)) })
			switch {
			case same < 0:
				found = append(found, r)
			case len(r.Changes) < len(found[same].Changes):
				found[same] = r
			}
		}
	}
	slices.SortStableFunc(found, func(a, b Remedy) int { return cmp.Compare(len(a.Changes), len(b.Changes)) })
	return found[:min(remediesShown, len(found))]
}

// kinds returns the kinds of a remedy's changes, each once.
func kinds(r Remedy) []Kind {
	var all []Kind
	for _, c := range r.Changes {
		all = append(all, c.Kind)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// estimate guesses how many changes the node's devices need.
func estimate(n *Node) int {
	const unlikely = 1000
	sum := 0
	for _, a := range n.asked {
		costs := []int{}
		for _, f := range a.fates {
			if f.matches() {
				costs = append(costs, len(blocking(f))+len(f.taints))
			}
		}
		if len(costs) < a.need {
			sum += unlikely
		}
		sort.Ints(costs)
		for _, c := range costs[:min(a.need, len(costs))] {
			sum += c
		}
	}
	return sum
}

// blocking returns the claims that keep a device from being free, each once.
func blocking(f fate) []*resourceapi.ResourceClaim {
	claims := slices.Concat(f.holders, f.users)
	slices.SortFunc(claims, func(x, y *resourceapi.ResourceClaim) int { return cmp.Compare(key(x), key(y)) })
	return slices.Compact(claims)
}

// blockers returns the changes that make one device free for a request.
func (e *Explainer) blockers(a asked, f fate) []Change {
	var all []Change
	for _, c := range blocking(f) {
		all = append(all, e.free(c))
	}
	for _, t := range f.taints {
		all = append(all, tolerate(a, f, t))
	}
	return all
}

func (e *Explainer) free(c *resourceapi.ResourceClaim) Change {
	return Change{Kind: Free, Claim: key(c), uid: fleet.UID(c), Sentence: sayFree(c, names(e.s.PodsOf(c)))}
}

func tolerate(a asked, f fate, t resourceapi.DeviceTaint) Change {
	t.TimeAdded = nil
	c := Change{Kind: Tolerate, Claim: key(a.claim), Request: a.request.name(), Taint: &t, Sentence: sayTolerate(a.request.name(), t)}
	// A node that is not ready refuses claims that tolerate its taint.
	if t.Key == device.DriverName+"/not-ready" {
		c.Kind, c.Sentence = RepairNode, sayRepair(f.pool.id.name, t)
	}
	return c
}

// remediesOn returns remedies for one node.
func (e *Explainer) remediesOn(ctx context.Context, q question, n *Node, base scenario) []Remedy {
	opened := base.with(n.opens...)
	fits := func(changes ...Change) bool {
		return ctx.Err() == nil && e.fits(ctx, q, n.node, opened.with(changes...))
	}
	var found []Remedy
	if fits() {
		return []Remedy{{n.Name, n.opens}}
	}
	add := func(changes []Change) {
		if len(changes) > 0 {
			found = append(found, Remedy{n.Name, slices.Concat(n.opens, changes)})
		}
	}
	// Ending claims, tolerating taints, and both.
	for _, usable := range []func(fate) bool{
		func(f fate) bool { return len(f.taints) == 0 },
		func(f fate) bool { return len(f.holders)+len(f.users) == 0 },
		func(fate) bool { return true },
	} {
		if changes := e.cheapest(n, usable); len(changes) > 0 && fits(changes...) {
			add(minimal(changes, fits))
		} else if changes := e.every(n, usable); len(changes) > 0 && fits(changes...) {
			add(minimal(changes, fits))
		}
	}
	// Another claim.
	single := e.specChanges(ctx, n)
	for _, alternatives := range single {
		if c, ok := firstFitting(alternatives, fits); ok {
			add([]Change{c})
		}
	}
	if len(found) == 0 {
		all := e.every(n, func(fate) bool { return true })
		for _, alternatives := range single {
			all = append(all, alternatives[len(alternatives)-1])
		}
		if fits(all...) {
			add(minimal(all, fits))
		}
	}
	return found
}

// firstFitting returns the first alternative that fits. Fewer devices fit wherever more fit, so
// numbers of devices are searched by halves.
func firstFitting(alternatives []Change, fits func(...Change) bool) (Change, bool) {
	var i int
	if alternatives[0].Kind == AskLess {
		i = sort.Search(len(alternatives), func(i int) bool { return fits(alternatives[i]) })
	} else {
		i = max(0, slices.IndexFunc(alternatives, func(c Change) bool { return fits(c) }))
	}
	if i == len(alternatives) || !fits(alternatives[i]) {
		return Change{}, false
	}
	return alternatives[i], true
}

// cheapest returns the changes that free the devices that need the fewest.
func (e *Explainer) cheapest(n *Node, usable func(fate) bool) []Change {
	var all []Change
	chosen := map[*resourceapi.Device]bool{}
	for _, a := range n.asked {
		type candidate struct {
			device  *resourceapi.Device
			changes []Change
		}
		var candidates []candidate
		for _, f := range a.fates {
			if f.matches() && usable(f) && f.gateOff == "" && !chosen[f.device] {
				candidates = append(candidates, candidate{f.device, e.blockers(a, f)})
			}
		}
		slices.SortStableFunc(candidates, func(x, y candidate) int { return cmp.Compare(len(x.changes), len(y.changes)) })
		for _, c := range candidates[:min(a.need, len(candidates))] {
			chosen[c.device] = true
			all = append(all, c.changes...)
		}
	}
	return unique(all)
}

// every returns the changes that free all matching devices.
func (e *Explainer) every(n *Node, usable func(fate) bool) []Change {
	var all []Change
	for _, a := range n.asked {
		for _, f := range a.fates {
			if f.matches() && usable(f) {
				all = append(all, e.blockers(a, f)...)
			}
		}
	}
	return unique(all)
}

func unique(all []Change) []Change {
	var kept []Change
	for _, c := range all {
		if !slices.ContainsFunc(kept, func(o Change) bool { return o.Sentence == c.Sentence && o.Claim == c.Claim && o.Request == c.Request }) {
			kept = append(kept, c)
		}
	}
	return kept
}

// minimal returns a part of changes that fits, and of which nothing can be left out. It halves the
// changes (QuickXplain), so that a large set needs few runs of the allocator.
// https://cdn.aaai.org/AAAI/2004/AAAI04-027.pdf
func minimal(changes []Change, fits func(...Change) bool) []Change {
	var explain func(background []Change, tested bool, rest []Change) []Change
	explain = func(background []Change, tested bool, rest []Change) []Change {
		if tested && fits(background...) {
			return nil
		}
		if len(rest) == 1 {
			return rest
		}
		half := len(rest) / 2
		second := explain(slices.Concat(background, rest[:half]), true, rest[half:])
		first := explain(slices.Concat(background, second), len(second) > 0, rest[:half])
		return slices.Concat(first, second)
	}
	return irreducible(explain(nil, false, changes), fits)
}

// irreducible leaves out each change that is not needed. After the halving there is one only if a
// change makes it harder to fit, as a claim for all devices may.
func irreducible(changes []Change, fits func(...Change) bool) []Change {
	for i := 0; i < len(changes); {
		if without := slices.Delete(slices.Clone(changes), i, i+1); fits(without...) {
			changes, i = without, 0
			continue
		}
		i++
	}
	if !fits(changes...) {
		return nil
	}
	return changes
}

// specChanges returns changes of the claims themselves. Each list has alternatives, the one that
// changes least first.
func (e *Explainer) specChanges(ctx context.Context, n *Node) [][]Change {
	var all [][]Change
	add := func(alternatives []Change) {
		if len(alternatives) > 0 {
			all = append(all, alternatives)
		}
	}
	for _, a := range n.asked {
		add(askLess(a))
		add(askCapacity(a))
		add(e.askOther(ctx, a))
		matching := 0
		for _, f := range a.fates {
			if f.matches() {
				matching++
			}
		}
		for _, s := range *a.request.fields().selectors {
			if s.CEL != nil && matching < max(a.need, 1) {
				add([]Change{{Kind: DropSelector, Claim: key(a.claim), Request: a.request.name(), Selector: s.CEL.Expression,
					Sentence: sayDropSelector(a.request.name(), s.CEL.Expression)}})
			}
		}
	}
	seen := map[*resourceapi.ResourceClaim]bool{}
	for _, a := range n.asked {
		if seen[a.claim] {
			continue
		}
		seen[a.claim] = true
		for i, c := range a.claim.Spec.Devices.Constraints {
			add([]Change{{Kind: DropConstraint, Claim: key(a.claim), Constraint: i, Sentence: sayDropConstraint(c)}})
		}
	}
	return all
}

func askLess(a asked) []Change {
	var all []Change
	least := a.need
	if *a.request.fields().mode == resourceapi.DeviceAllocationModeAll {
		least = min(least, resourceapi.AllocationResultsMaxSize) + 1
	}
	for n := int64(min(least-1, resourceapi.AllocationResultsMaxSize)); n > 0; n-- {
		all = append(all, Change{
			Kind: AskLess, Claim: key(a.claim), Request: a.request.name(), Count: n,
			Sentence: sayAskLess(a.request.name(), n, a.need),
		})
	}
	return all
}

// askCapacity returns the amounts that are left on devices with too little for the request.
func askCapacity(a asked) []Change {
	var all []Change
	f := a.request.fields()
	if *f.capacity == nil {
		return nil
	}
	for _, one := range a.fates {
		_, asked := (*f.capacity).Requests[resourceapi.QualifiedName(one.capacity)]
		if asked && one.matches() && one.left.Sign() > 0 {
			left := one.left
			all = append(all, Change{Kind: AskCapacity, Claim: key(a.claim), Request: a.request.name(), Capacity: one.capacity,
				Amount: &left, Sentence: sayAskCapacity(a.request.name(), one.capacity, left, one.wanted)})
		}
	}
	slices.SortStableFunc(all, func(x, y Change) int { return y.Amount.Cmp(*x.Amount) })
	return all
}

// askOther returns requests for other kinds of device with less memory than the one asked for, the
// largest first.
func (e *Explainer) askOther(ctx context.Context, a asked) []Change {
	type shape struct {
		kind, profile   string
		memory, compute resource.Quantity
	}
	compare := func(x, y shape) int { return cmp.Or(x.memory.Cmp(y.memory), x.compute.Cmp(y.compute)) }
	shapeOf := func(f fate) (shape, bool) {
		kind, _ := attribute(f.pool.id, f.device, device.DriverName+"/type")
		profile, _ := attribute(f.pool.id, f.device, device.DriverName+"/profile")
		if f.pool.id.driver != device.DriverName || kind != "gpu" && kind != "mig" {
			return shape{}, false
		}
		return shape{kind, profile, f.device.Capacity["memory"].Value, f.device.Capacity["multiprocessors"].Value}, true
	}
	var asks *shape
	shapes := map[string]shape{}
	pools := map[string]fate{}
	for _, f := range a.fates {
		s, ok := shapeOf(f)
		if !ok {
			continue
		}
		if f.matches() && (asks == nil || compare(s, *asks) < 0) {
			asks = ptr.To(s)
		}
		shapes[s.kind+s.profile], pools[s.kind+s.profile] = s, f
	}
	if asks == nil {
		return nil
	}
	var smaller []shape
	for _, s := range shapes {
		if compare(s, *asks) < 0 {
			smaller = append(smaller, s)
		}
	}
	slices.SortFunc(smaller, func(x, y shape) int { return cmp.Or(compare(y, x), cmp.Compare(x.profile, y.profile)) })
	var all []Change
	for _, s := range smaller {
		f := pools[s.kind+s.profile]
		class := e.classFor(ctx, f)
		if class == "" {
			continue
		}
		all = append(all, Change{
			Kind: AskOther, Claim: key(a.claim), Request: a.request.name(), Class: class, Selector: selectorFor(s.kind, s.profile),
			Sentence: sayAskOther(a.request.name(), shapeName(s.kind, s.profile), shapeName(asks.kind, asks.profile), class),
		})
	}
	return all
}

func selectorFor(kind, profile string) string {
	prefix := "device.attributes['" + device.DriverName + "']"
	if profile == "" {
		return prefix + ".type == '" + kind + "'"
	}
	return prefix + ".type == '" + kind + "' && " + prefix + ".profile == '" + profile + "'"
}

// classFor returns a DeviceClass that selects the device, preferably one without configuration. It
// returns "" if there is none.
func (e *Explainer) classFor(ctx context.Context, f fate) string {
	best, config := "", 0
	for _, c := range e.s.Classes {
		if failing, err := e.failing(ctx, f.pool.id, f.device, c.Spec.Selectors); failing != "" || err != nil {
			continue
		}
		if best == "" || len(c.Spec.Config) < config || len(c.Spec.Config) == config && c.Name < best {
			best, config = c.Name, len(c.Spec.Config)
		}
	}
	return best
}
