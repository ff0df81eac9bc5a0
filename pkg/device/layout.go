package device

import (
	"fmt"
	"slices"
)

// Layout says in which shapes a GPU is offered.
type Layout struct {
	Whole bool
	// Placements stands for every placement, to be cut on demand.
	Placements bool
	// Instances are offered as they are: those that an admin made, and those of ours that claims hold.
	Instances []Instance
	// Counters says that shapes overlap, and that counters keep them apart.
	Counters bool
}

// Offering is a GPU with the shapes in which it is offered.
type Offering struct {
	GPU
	Layout
	// Shares says which of the shapes are also offered in shares. None are unless [WhyNotShared] lacks nothing.
	Shares ShareRules
	// NoFractions says why nothing could keep processes to fractions of this GPU; see [WhyNoFractions]. It is not offered in any then.
	NoFractions string
	// HeldShares are the share devices that claims hold, by their names, and whether they hold them in fractions. They stay in the pool, without anything to be
	// had of them, where the rules say something else by now: else the scheduler would no longer know that they keep others away.
	HeldShares map[string]bool
}

// Decide is the one place that knows how a GPU is offered. owned are those of its instances that claims of ours explain, whatever else is there is an
// admin's; counters says whether the cluster keeps shared counters. The reason says why the GPU is not offered in every shape that its model has, for
// people to read. It is empty if it is.
func Decide(g GPU, owned []Instance, policy Policy, counters bool) (_ Layout, reason string) {
	m := g.MIG
	if m == nil {
		return Layout{Whole: true}, ""
	}
	foreign := slices.ContainsFunc(m.Instances, func(i Instance) bool { return !slices.ContainsFunc(owned, i.same) })
	asCut := Layout{Instances: m.Instances}
	switch {
	case m.Uncuttable:
		return asItIs(m), "instances can be used but not made here, as in the guest of a virtual GPU"
	case foreign && policy == PolicyOff:
		return Layout{Instances: owned}, "MIG instances are there that no claim has made, and the policy is to offer the GPU as a whole only: remove them with nvidia-smi mig"
	case foreign && policy == PolicyAdopt:
		return asCut, "MIG instances are there that no claim has made: it is offered as it is cut until those that are idle are removed"
	case foreign:
		return asCut, "MIG instances are there that no claim has made: it is offered as it is cut"
	case policy == PolicyStatic:
		return asItIs(m), "the policy is to offer it as it is cut"
	case policy == PolicyOff && len(owned) > 0:
		return asCut, "the policy is to offer it as a whole only, which waits for claims that hold partitions"
	case m.ModeFixed:
		return decideFixed(g, policy, counters)
	case policy == PolicyOff:
		return Layout{Whole: true}, "the policy is to offer it as a whole only"
	case !counters || budgetOf(m) == nil:
		if len(m.Instances) > 0 {
			return asCut, whyNotCounted(g, counters)
		}
		return Layout{Whole: true}, whyNotCounted(g, counters)
	default:
		return Layout{Whole: true, Placements: true, Counters: true}, ""
	}
}

// decideFixed is for a card that only a reset brings from one mode to the other: it has the shapes of the mode that it is in.
func decideFixed(g GPU, policy Policy, counters bool) (_ Layout, reason string) {
	m := g.MIG
	after := ""
	if m.Pending != m.Enabled {
		after = ", which is pending"
	}
	switch {
	case !m.Enabled:
		return Layout{Whole: true}, "MIG mode is off, and on this card only a reset turns it on" + after
	case policy == PolicyOff:
		return Layout{}, "the policy is to offer it as a whole only, but MIG mode is on, and on this card only a reset turns it off" + after
	case !counters || budgetOf(m) == nil:
		return Layout{Instances: m.Instances}, whyNotCounted(g, counters)
	default:
		return Layout{Placements: true, Counters: true}, "MIG mode is on, and on this card only a reset turns it off" + after
	}
}

// asItIs is a GPU about which nothing is to be changed.
func asItIs(m *MIG) Layout {
	return Layout{Whole: !m.Enabled, Instances: m.Instances}
}

func whyNotCounted(g GPU, counters bool) string {
	switch {
	case !counters:
		return "the cluster keeps no shared counters (feature gate DRAPartitionableDevices, from Kubernetes 1.35), without which shapes that overlap would be given away twice"
	case len(g.MIG.Profiles) == 0:
		return "what it can be cut into is not known"
	default:
		return fmt.Sprintf("its %d profiles cannot be described with the number of counters that the API allows", len(g.MIG.Profiles))
	}
}

// same leaves out what follows from the rest.
func (i Instance) same(o Instance) bool {
	return i.ID == o.ID && i.ProfileID == o.ProfileID && i.Placement == o.Placement
}
