package preview

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// addUnlisted adds to the node the GPUs that NVML does not list but that virtual machines can get.
func (p *Offer) addUnlisted(r Rules) error {
	var found []device.GPU
	unlisted := p.Node.Passthrough
	for _, g := range unlisted {
		claimed, forContainers := false, false
		if r.Records != nil {
			var err, failed error
			claimed, err = r.Records.InUse(g.WholeName())
			forContainers, failed = r.Records.InUseByContainers(g.WholeName())
			if err = cmp.Or(err, failed); err != nil {
				return fmt.Errorf("find out whether a claim has %s: %w", g.WholeName(), err)
			}
		}
		why, offered := p.unlistedOffer(g, claimed, forContainers)
		p.unlisted = append(p.unlisted, g.WholeName()+": "+why)
		if offered {
			facts := *g.Passthrough
			facts.BoundByAdmin = facts.BoundByAdmin && !claimed // else it is the claim that has it bound
			g.Passthrough = &facts
			found = append(found, g)
		}
	}
	p.Node = p.Node.WithUnlisted(found)
	p.Node.Problems = slices.DeleteFunc(p.Node.Problems, func(problem nvidia.Problem) bool {
		return slices.ContainsFunc(unlisted, func(g device.GPU) bool { return g.PCIAddress == problem.PCIAddress })
	})
	return nil
}

// unlistedOffer says whether virtual machines can get a GPU that NVML does not list, and why.
func (p *Offer) unlistedOffer(g device.GPU, claimed, forContainers bool) (why string, offered bool) {
	policy := p.policies.For(g)
	what := "NVML does not list it"
	for _, problem := range p.Node.Problems {
		if problem.PCIAddress == g.PCIAddress {
			what = problem.Message
		}
	}
	switch {
	case g.Passthrough == nil:
		return what + "; not for virtual machines: " + cmp.Or(g.NoPassthrough, "unknown"), false
	case forContainers:
		return what + "; not for virtual machines: a claim has it for containers", false
	case claimed && g.Passthrough.BoundByAdmin:
		return "a claim has it for a virtual machine", true
	case !policy.Passthrough:
		return what + "; not for virtual machines: passthrough is off for it", false
	case g.Passthrough.BoundByAdmin:
		return "bound to VFIO by no claim: for virtual machines only", true
	case policy.OffersUnlisted(g, p.Node.Driver.Version == ""):
		return "no kernel driver has it, and NVIDIA's driver is missing: for virtual machines only", true
	default:
		return what, false
	}
}
