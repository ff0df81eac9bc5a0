package preview

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// addUnlisted adds to the node the GPUs that NVML does not list but that virtual machines can get.
// Package nodeview decides the same for the plugin.
func (p *Offer) addUnlisted(r Rules) error {
	var problems []nvidia.Problem
	gpus := slices.Clone(p.Node.GPUs)
	for _, g := range p.Node.Passthrough {
		claimed := false
		if r.Records != nil {
			var err error
			if claimed, err = r.Records.InUse(g.WholeName()); err != nil {
				return fmt.Errorf("find out whether a claim has %s: %w", g.WholeName(), err)
			}
		}
		why, offered := p.unlistedOffer(g, claimed)
		p.unlisted = append(p.unlisted, g.WholeName()+": "+why)
		if offered {
			facts := *g.Passthrough
			facts.BoundByAdmin = facts.BoundByAdmin && !claimed // else it is the claim that has it bound
			g.Passthrough = &facts
			gpus = append(gpus, nvidia.GPU{GPU: g})
		}
	}
	for _, problem := range p.Node.Problems {
		is := func(g device.GPU) bool { return g.PCIAddress == problem.PCIAddress }
		if !slices.ContainsFunc(p.Node.Passthrough, is) {
			problems = append(problems, problem)
		}
	}
	slices.SortFunc(gpus, func(a, b nvidia.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
	p.Node.GPUs, p.Node.Problems = gpus, problems
	return nil
}

// unlistedOffer says whether virtual machines can get a GPU that NVML does not list, and why.
func (p *Offer) unlistedOffer(g device.GPU, claimed bool) (why string, offered bool) {
	what := "NVML does not list it"
	for _, problem := range p.Node.Problems {
		if problem.PCIAddress == g.PCIAddress {
			what = problem.Message
		}
	}
	switch {
	case g.Passthrough == nil:
		return what + "; not for virtual machines: " + cmp.Or(g.NoPassthrough, "unknown"), false
	case claimed && g.Passthrough.BoundByAdmin:
		return "a claim has it for a virtual machine", true
	case !p.policies.For(g).Passthrough:
		return what + "; not for virtual machines: passthrough is off for it", false
	case g.Passthrough.BoundByAdmin:
		return "bound to VFIO by no claim: for virtual machines only", true
	case p.Node.Driver.Version == "" && !g.Passthrough.HasDriver:
		return "no kernel driver has it, and NVIDIA's driver is missing: for virtual machines only", true
	default:
		return what, false
	}
}

// writeUnlisted lists the GPUs that NVML does not list.
func writeUnlisted(out io.Writer, p Offer) error {
	for i, line := range p.unlisted {
		if i == 0 {
			fmt.Fprintln(out, "\nNot listed by NVML:")
		}
		if _, err := fmt.Fprintf(out, "  %s\n", line); err != nil {
			return err
		}
	}
	return nil
}
