package device

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Layout says which devices of a GPU are offered: the GPU as a whole, to virtual machines,
// placements or existing MIG instances.
type Layout struct {
	Whole bool
	// VFIO is true if the GPU is offered to virtual machines.
	VFIO bool
	// Placements is true if the placements of the GPU's profiles are offered, and the plugin creates
	// their MIG instances on demand. Placements overlap, so counters must keep them apart.
	Placements bool
	// Profiles has the names of the profiles whose placements are offered. If it is empty, those of
	// all profiles are offered.
	Profiles []string
	// Instances are existing MIG instances, which are offered as they are. An admin created them, or
	// claims have them.
	Instances []Instance
}

// Offering is a GPU and what decides which of its devices are published: the layout, the share
// rules and the devices that claims have.
type Offering struct {
	GPU
	Layout
	// Shares says which of the devices are also offered in shares. It must be empty unless
	// [SharingUnsupportedReason] returns "".
	Shares ShareRules
	// FractionsUnsupported says why MPS cannot share this GPU with limits for each claim (see
	// [FractionsUnsupportedReason]). It is empty if MPS can.
	FractionsUnsupported string
	// Counted makes the devices of all GPUs of the node consume counters even if no devices overlap.
	// It is set while published devices of this GPU are being removed, because until then the
	// scheduler may still allocate them.
	Counted bool
	// Held has the names of the devices that one claim has alone. The value is true if the device is
	// published with counters. These devices stay published that way until their claims end, because
	// otherwise the scheduler over-commits the GPU
	// (https://github.com/kubernetes/kubernetes/issues/140802).
	Held map[string]bool
	// HeldShares has the names of the share devices of which claims have shares. The value is true if
	// MPS limits these shares. A share device that is no longer offered stays published, but no
	// further share can be allocated.
	HeldShares map[string]bool
}

// Decide chooses which devices of the GPU g are offered. owned are its MIG instances that were
// created for claims; all others belong to an admin. counters is true if the cluster supports
// shared counters. reason says why less is offered than the policy wants. Otherwise it is empty.
func Decide(g GPU, owned []Instance, policy Policy, counters bool) (_ Layout, reason string) {
	if g.PassthroughOnly() {
		return Layout{VFIO: policy.Passthrough}, g.boundReason()
	}
	l, reason := decideMIG(g, owned, policy, counters)
	if !policy.Passthrough {
		return l, reason
	}
	var impossible string
	l.VFIO, impossible = decidePassthrough(g, l, counters)
	return l, strings.Join(slices.DeleteFunc([]string{reason, impossible}, func(s string) bool { return s == "" }), "; ")
}

// boundReason says why containers cannot get a GPU that is bound to VFIO for no claim. An admin did
// that on purpose, or the record of a claim was lost.
func (g GPU) boundReason() string {
	if !g.Passthrough.BoundByAdmin {
		return ""
	}
	return "a VFIO driver has the GPU and no claim does, so only virtual machines can get it: to give it back to its driver, " +
		"write on the node for its PCI address A, and for the other functions of its slot: " +
		"echo > /sys/bus/pci/devices/A/driver_override && echo A > /sys/bus/pci/devices/A/driver/unbind && echo A > /sys/bus/pci/drivers_probe"
}

// decidePassthrough reports whether a GPU that is offered like l is also offered to virtual
// machines. Only a GPU that is offered whole can be, because both need it without MIG instances.
func decidePassthrough(g GPU, l Layout, counters bool) (offered bool, reason string) {
	const not = "not offered to virtual machines: "
	switch {
	case g.Passthrough == nil:
		return false, not + cmp.Or(g.NoPassthrough, "passthrough is off in the plugin's settings, so it may not bind GPUs to VFIO")
	case !l.Whole:
		return false, not + "the GPU is not offered whole"
	case !counters:
		return false, not + noCounters
	}
	return true, ""
}

// decideMIG chooses which devices of the GPU are offered to containers.
func decideMIG(g GPU, owned []Instance, policy Policy, counters bool) (_ Layout, reason string) {
	m := g.MIG
	if m == nil {
		return Layout{Whole: true}, ""
	}
	foreign := slices.ContainsFunc(m.Instances, func(i Instance) bool { return !slices.ContainsFunc(owned, i.same) })
	asIs := Layout{Instances: m.Instances}
	policy, problem := policy.On(g)
	switch {
	case m.ReadOnly:
		return decideReadOnly(m, policy)
	case policy.Mode == PolicyOff:
		return decideOff(m, owned, foreign)
	case !policy.CreatesInstances():
		return decideStatic(m, foreign, problem)
	case foreign && policy.Mode == PolicyAdopt:
		return asIs, "MIG instances exist that no claim created: the GPU is offered as partitioned until the idle ones are removed"
	case foreign:
		return asIs, "MIG instances exist that no claim created: the GPU is offered as partitioned"
	case m.ModeFixed && !m.Enabled:
		return Layout{Whole: true}, "MIG mode is off, and only a GPU reset enables it on this card" + m.afterReset()
	case !counters || migBudget(g) == nil:
		return Layout{Whole: len(m.Instances) == 0 && !m.ModeFixed, Instances: m.Instances}, countersUnsupportedReason(g, counters)
	}
	layout := Layout{Whole: true, Placements: true, Profiles: policy.Profiles, Instances: instancesOutside(policy.Profiles, g)}
	if m.ModeFixed {
		layout.Whole = false
		return layout, "MIG mode is on, and only a GPU reset disables it on this card" + m.afterReset()
	}
	return layout, ""
}

// decideReadOnly chooses what is offered of a GPU whose MIG instances the plugin cannot create or
// remove. reason says why less is offered than the policy wants. Otherwise it is empty.
func decideReadOnly(m *MIG, policy Policy) (_ Layout, reason string) {
	const guest = "MIG instances can be used but not created here, as in a vGPU guest"
	layout := Layout{Whole: !m.Enabled, Instances: m.Instances}
	switch {
	case m.Enabled && len(m.Instances) == 0:
		return layout, "nothing is offered: MIG mode is on and there is no MIG instance; " + guest
	case policy.CreatesInstances() || policy.Mode == PolicyOff && m.Enabled:
		return layout, guest
	default:
		return layout, ""
	}
}

func decideOff(m *MIG, owned []Instance, foreign bool) (_ Layout, reason string) {
	switch {
	case foreign:
		return Layout{Instances: owned}, "MIG instances exist that no claim created, and the policy offers whole GPUs only: " +
			"remove them with nvidia-smi mig"
	case len(owned) > 0:
		return Layout{Instances: m.Instances}, "the policy offers whole GPUs only: waiting for claims that hold partitions"
	case m.ModeFixed && m.Enabled:
		return Layout{}, "the policy offers whole GPUs only, but MIG mode is on, and only a GPU reset disables it on this card" + m.afterReset()
	default:
		return Layout{Whole: true}, ""
	}
}

// decideStatic chooses what is offered under the policy static: the whole GPU, or the MIG instances
// that exist. reason says why less is offered than configured. It begins with problem, which is why
// another policy was replaced by static, or "".
func decideStatic(m *MIG, foreign bool, problem string) (_ Layout, reason string) {
	reasons := []string{problem}
	switch {
	case !m.Enabled || foreign:
	case len(m.Instances) > 0:
		reasons = append(reasons, "the GPU is not offered whole while claims hold its partitions")
	default:
		reasons = append(reasons, "nothing is offered: MIG mode is on and there is no MIG instance; "+
			"create one with nvidia-smi mig -cgi PROFILE -C, or disable MIG mode with nvidia-smi -mig 0"+m.afterReset())
	}
	reasons = slices.DeleteFunc(reasons, func(s string) bool { return s == "" })
	return Layout{Whole: !m.Enabled, Instances: m.Instances}, strings.Join(reasons, "; ")
}

// afterReset returns the end of a message that asks for a reset to change the MIG mode. It says
// whether the change is already pending.
func (m *MIG) afterReset() string {
	if m.Pending != m.Enabled {
		return ", which is pending"
	}
	return ""
}

// instancesOutside returns the GPU's MIG instances whose profiles are not in profiles.
func instancesOutside(profiles []string, g GPU) []Instance {
	var others []Instance
	for _, i := range g.MIG.Instances {
		if p, _ := g.Profile(i.ProfileID); !offersProfile(profiles, p) {
			others = append(others, i)
		}
	}
	return others
}

// offersProfile reports whether the placements of the profile p are offered. profiles has the names
// of the profiles that the policy allows. An empty list allows all of them.
func offersProfile(profiles []string, p Profile) bool {
	return len(profiles) == 0 || slices.Contains(profiles, p.Name)
}

const noCounters = "the cluster does not support shared counters (feature gate DRAPartitionableDevices, from Kubernetes 1.35), " +
	"which overlapping devices need"

func countersUnsupportedReason(g GPU, counters bool) string {
	switch {
	case !counters:
		return noCounters
	case len(g.MIG.Profiles) == 0:
		return "the GPU's MIG profiles are not known"
	default:
		return fmt.Sprintf("the GPU's %d MIG profiles need more counters than the API allows", len(g.MIG.Profiles))
	}
}

// same reports whether i and o are the same GPU instance. It compares the ID, the profile and the
// placement, because the other fields follow from these.
func (i Instance) same(o Instance) bool {
	return i.ID == o.ID && i.ProfileID == o.ProfileID && i.Placement == o.Placement
}
