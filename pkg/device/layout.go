package device

import (
	"fmt"
	"slices"
	"strings"
)

// Layout says in which shapes a GPU is offered.
type Layout struct {
	Whole bool
	// Placements stands for every placement, to be cut on demand. They overlap, so counters keep
	// them apart.
	Placements bool
	// Profiles are the names of those whose placements are offered. None stands for all.
	Profiles []string
	// Instances are offered as they are: those that an admin made, and those of ours that claims hold.
	Instances []Instance
}

// Offering is a GPU with the shapes in which it is offered.
type Offering struct {
	GPU
	Layout
	// Shares says which of the shapes are also offered in shares. None are unless [WhyNotShared] lacks nothing.
	Shares ShareRules
	// NoFractions says why nothing could keep processes to fractions of this GPU; see [WhyNoFractions]. It is not offered in any then.
	NoFractions string
	// Counted has the devices of all the node's GPUs counted, although nothing may overlap. A GPU whose
	// devices are being withdrawn must not take the counters of the others along.
	Counted bool
	// Held are the devices that claims hold alone, by their names, and whether they consume
	// counters as they are published. They stay published so until their claims end, whatever the
	// layout says: the scheduler would over-commit the GPU
	// (https://github.com/kubernetes/kubernetes/issues/140802).
	Held map[string]bool
	// HeldShares are the share devices that claims hold, by their names, and whether they hold them in fractions. They stay in the pool, without anything to be
	// had of them, where the rules or the layout say something else by now.
	HeldShares map[string]bool
}

// Decide is the one place that knows how a GPU is offered. owned are those of its instances that
// claims of ours explain, whatever else is there is an admin's; counters says whether the cluster
// keeps shared counters. The reason says what of the policy's promise the GPU does not keep, for
// people to read. It is empty if it keeps all.
func Decide(g GPU, owned []Instance, policy Policy, counters bool) (_ Layout, reason string) {
	m := g.MIG
	if m == nil {
		return Layout{Whole: true}, ""
	}
	foreign := slices.ContainsFunc(m.Instances, func(i Instance) bool { return !slices.ContainsFunc(owned, i.same) })
	asCut := Layout{Instances: m.Instances}
	policy, problem := policy.On(g)
	switch {
	case m.Uncuttable:
		return decideUncuttable(m, policy)
	case policy.Mode == PolicyOff:
		return decideOff(m, owned, foreign)
	case !policy.Cuts():
		return decideStatic(m, foreign, problem)
	case foreign && policy.Mode == PolicyAdopt:
		return asCut, "MIG instances are there that no claim has made: it is offered as it is cut until those that are idle are removed"
	case foreign:
		return asCut, "MIG instances are there that no claim has made: it is offered as it is cut"
	case m.ModeFixed && !m.Enabled:
		return Layout{Whole: true}, "MIG mode is off, and on this card only a reset turns it on" + m.afterReset()
	case !counters || budgetOf(g) == nil:
		return Layout{Whole: len(m.Instances) == 0 && !m.ModeFixed, Instances: m.Instances}, whyNotCounted(g, counters)
	}
	places := Layout{Whole: true, Placements: true, Profiles: policy.Profiles, Instances: outside(policy.Profiles, g)}
	if m.ModeFixed {
		places.Whole = false
		return places, "MIG mode is on, and on this card only a reset turns it off" + m.afterReset()
	}
	return places, ""
}

// decideUncuttable is for a card about which nothing can be changed here. Under a policy that
// changes nothing that is no limit.
func decideUncuttable(m *MIG, policy Policy) (_ Layout, reason string) {
	const guest = "instances can be used but not made here, as in the guest of a virtual GPU"
	layout := Layout{Whole: !m.Enabled, Instances: m.Instances}
	switch {
	case m.Enabled && len(m.Instances) == 0:
		return layout, "nothing is offered: MIG mode is on and there is no MIG instance; " + guest
	case policy.Cuts() || policy.Mode == PolicyOff && m.Enabled:
		return layout, guest
	default:
		return layout, ""
	}
}

func decideOff(m *MIG, owned []Instance, foreign bool) (_ Layout, reason string) {
	switch {
	case foreign:
		return Layout{Instances: owned}, "MIG instances are there that no claim has made, and the policy is to offer the GPU as a whole only: remove them with nvidia-smi mig"
	case len(owned) > 0:
		return Layout{Instances: m.Instances}, "the policy is to offer it as a whole only, which waits for claims that hold partitions"
	case m.ModeFixed && m.Enabled:
		return Layout{}, "the policy is to offer it as a whole only, but MIG mode is on, and on this card only a reset turns it off" + m.afterReset()
	default:
		return Layout{Whole: true}, ""
	}
}

// decideStatic keeps its promise with what an admin cut, and with a whole GPU. problem is why
// another policy does not hold.
func decideStatic(m *MIG, foreign bool, problem string) (_ Layout, reason string) {
	reasons := []string{problem}
	switch {
	case !m.Enabled || foreign:
	case len(m.Instances) > 0:
		reasons = append(reasons, "it is not offered whole while claims hold partitions that were made for them")
	default:
		reasons = append(reasons, "nothing is offered: MIG mode is on and there is no MIG instance; cut it with nvidia-smi mig -cgi PROFILE -C, "+
			"or turn MIG mode off with nvidia-smi -mig 0"+m.afterReset())
	}
	reasons = slices.DeleteFunc(reasons, func(s string) bool { return s == "" })
	return Layout{Whole: !m.Enabled, Instances: m.Instances}, strings.Join(reasons, "; ")
}

// afterReset goes behind what only a reset changes.
func (m *MIG) afterReset() string {
	if m.Pending != m.Enabled {
		return ", which is pending"
	}
	return ""
}

// outside are the instances of profiles that a list does not name.
func outside(profiles []string, g GPU) []Instance {
	var others []Instance
	for _, i := range g.MIG.Instances {
		if p, _ := g.Profile(i.ProfileID); !offers(profiles, p) {
			others = append(others, i)
		}
	}
	return others
}

// offers says whether the placements of a profile are offered.
func offers(profiles []string, p Profile) bool {
	return len(profiles) == 0 || slices.Contains(profiles, p.Name)
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
