package explain

import (
	"context"
	"errors"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
)

// fatal returns the reason why the allocator returns an error for the node, which ends the
// scheduler's attempt for all nodes.
func (n Node) fatal() (Reason, bool) {
	if len(n.opens) > 0 || n.closed {
		return Reason{}, false // the scheduler does not ask its allocator
	}
	// The first one says best what is wrong.
	for _, code := range []string{CodeSelectorError, CodeTooMany, CodeError} {
		failed := code == CodeSelectorError || slices.ContainsFunc(n.Reasons, func(r Reason) bool { return r.Code == CodeError })
		if i := slices.IndexFunc(n.Reasons, func(r Reason) bool { return r.Code == code }); i >= 0 && failed {
			return n.Reasons[i], true
		}
	}
	return Reason{}, false
}

func errorReason(err error) Reason {
	if errors.Is(err, errGaveUp) {
		return Reason{Code: CodeGaveUp, Sentence: sayGaveUp()}
	}
	return Reason{Code: CodeError, Sentence: err.Error()}
}

// needed returns how many devices the request needs.
func needed(r request, fates []fate) int {
	if f := r.fields(); *f.mode != resourceapi.DeviceAllocationModeAll {
		return int(min(*f.count, resourceapi.AllocationResultsMaxSize+1))
	}
	n := 0
	for _, f := range fates {
		if f.matches() {
			n++
		}
	}
	return max(n, 1)
}

// claimReasons returns the reasons that are about more than one device. Dropping a constraint shows
// whether it is a reason.
func (e *Explainer) claimReasons(ctx context.Context, candidates []*resourceapi.ResourceSlice, base scenario, n Node) []Reason {
	var all []Reason
	enough := true
	for _, a := range n.asked {
		free := 0
		for _, f := range a.fates {
			if f.free() {
				free++
			}
		}
		// Of a prioritized list one alternative is enough, and each has its own reasons.
		enough = enough && (free >= a.need || a.request.sub != nil)
	}
	if !enough {
		return nil
	}
	for _, c := range base.claims {
		for i, constraint := range c.Spec.Devices.Constraints {
			drop := Change{Kind: DropConstraint, Claim: key(c), Constraint: i}
			if results, err := e.allocateOf(ctx, n.node, candidates, base.with(drop)); err == nil && len(results) == len(base.claims) {
				all = append(all, Reason{Code: CodeConstraint, Claims: []string{key(c)}, Sentence: sayConstraint(constraint, groups(n, c, constraint))})
			}
		}
	}
	alternatives := slices.ContainsFunc(n.asked, func(a asked) bool { return a.request.sub != nil })
	if len(all) == 0 && (len(n.Reasons) == 0 || !alternatives) {
		all = append(all, Reason{Code: CodeTogether, Sentence: sayTogether()})
	}
	return all
}

// groups counts the free devices of the constraint's requests by the value of its attribute.
func groups(n Node, c *resourceapi.ResourceClaim, constraint resourceapi.DeviceConstraint) map[string]int {
	count := map[string]int{}
	name := constraint.MatchAttribute
	if name == nil {
		name = constraint.DistinctAttribute
	}
	seen := map[*resourceapi.Device]bool{}
	for _, a := range n.asked {
		if name == nil || a.claim != c ||
			len(constraint.Requests) > 0 && !slices.Contains(constraint.Requests, strings.Split(a.request.name(), "/")[0]) {
			continue
		}
		for _, f := range a.fates {
			if !f.free() || seen[f.device] {
				continue
			}
			seen[f.device] = true
			value, has := attribute(f.pool.id, f.device, *name)
			if !has {
				value = "(none)"
			}
			count[value]++
		}
	}
	return count
}

// requestReasons returns why the node has too few devices for one request. It returns none if the
// node has enough.
func requestReasons(a asked) []Reason {
	var all []Reason
	name := a.request.name()
	add := func(r Reason) {
		r.Request = name
		all = append(all, r)
	}
	total, matching, free := len(a.fates), 0, 0
	for _, f := range a.fates {
		if f.failure != nil {
			add(Reason{Code: CodeSelectorError, Selector: f.selector, Sentence: saySelectorError(f)})
			return all
		}
		if f.matches() {
			matching++
		}
		if f.free() {
			free++
		}
	}
	if free >= a.need && matching > 0 {
		return nil
	}
	if matching < a.need || matching == 0 {
		for _, g := range group(a.fates, func(f fate) (string, bool) { return f.class + "\x00" + f.selector, !f.matches() }) {
			add(Reason{Code: CodeSelector, Devices: len(g), Selector: g[0].selector, Sentence: saySelector(len(g), total, g[0])})
		}
	}
	if matching == 0 {
		return all
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return "", f.matches() && len(f.holders) > 0 }) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.holders })
		add(Reason{Code: CodeTaken, Devices: len(g), Claims: claims, Sentence: sayTaken(len(g), matching, claims)})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) {
		return "", f.matches() && len(f.counters) > 0 && len(f.holders) == 0
	}) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.users })
		counters := union(g, func(f fate) []string { return f.counters })
		add(Reason{
			Code: CodeCounters, Devices: len(g), Claims: claims, Counters: counters,
			Sentence: sayCounters(len(g), matching, counters, claims),
		})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return f.capacity, f.matches() && f.capacity != "" }) {
		claims := claimsIn(g, func(f fate) []*resourceapi.ResourceClaim { return f.users })
		add(Reason{Code: CodeCapacity, Devices: len(g), Claims: claims, Sentence: sayCapacity(len(g), matching, g, claims)})
	}
	for _, taint := range union(a.fates, taintTexts) {
		n := 0
		for _, f := range a.fates {
			if slices.Contains(taintTexts(f), taint) {
				n++
			}
		}
		add(Reason{Code: CodeTaint, Devices: n, Taint: taint, Sentence: sayTaint(n, matching, taint)})
	}
	for _, g := range group(a.fates, func(f fate) (string, bool) { return f.gateOff, f.matches() && f.gateOff != "" }) {
		add(Reason{Code: CodeFeatureOff, Devices: len(g), Sentence: sayDeviceGate(len(g), matching, g[0].gateOff)})
	}
	if a.need > resourceapi.AllocationResultsMaxSize {
		add(Reason{Code: CodeTooMany, Sentence: sayTooMany(a.need)})
	} else if *a.request.fields().mode == resourceapi.DeviceAllocationModeAll {
		add(Reason{Code: CodeAll, Devices: matching, Sentence: sayAll(free, matching)})
	} else if a.need > 1 {
		add(Reason{Code: CodeCount, Devices: free, Sentence: sayCount(a.need, free, matching)})
	}
	return all
}

func taintTexts(f fate) []string {
	var all []string
	for _, t := range f.taints {
		all = append(all, fleet.TaintText(t))
	}
	return all
}

// group returns the fates that the function wants, by the key that it gives, in order of the keys.
func group(all []fate, by func(fate) (string, bool)) [][]fate {
	groups := map[string][]fate{}
	var keys []string
	for _, f := range all {
		k, wanted := by(f)
		if !wanted {
			continue
		}
		if groups[k] == nil {
			keys = append(keys, k)
		}
		groups[k] = append(groups[k], f)
	}
	slices.Sort(keys)
	var sorted [][]fate
	for _, k := range keys {
		sorted = append(sorted, groups[k])
	}
	return sorted
}

func claimsIn(all []fate, of func(fate) []*resourceapi.ResourceClaim) []string {
	return union(all, func(f fate) []string {
		var names []string
		for _, c := range of(f) {
			names = append(names, key(c))
		}
		return names
	})
}

func union(all []fate, of func(fate) []string) []string {
	var names []string
	for _, f := range all {
		names = append(names, of(f)...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
