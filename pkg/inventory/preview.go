package inventory

import (
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Rules decide what of a node's GPUs is offered: what an admin has configured, and what claims hold.
type Rules struct {
	Policies device.Policies
	Shares   device.ShareRules
	// Records are nil where there are none: then nothing is held, and every MIG instance is an admin's.
	Records Records
}

// Records say what claims hold. Package prepare has them.
type Records interface {
	// Explained is the part of a GPU's instances that was made for claims.
	Explained(gpu string, instances []device.Instance) ([]device.Instance, error)
	// HeldShares are the devices of which claims hold shares, and whether these are fractions.
	HeldShares() (map[string]bool, error)
}

// Preview is what a node would offer to a cluster that keeps all that can be published, as far as that shows on the node. It is for people to read: hardware
// and records are of two moments, so that what is cut or given back between them is shown wrongly.
type Preview struct {
	Node nvidia.Node
	// Holders are the processes that have a GPU open, by its name: they may keep it from being cut.
	Holders map[string][]nvidia.Process

	policies device.Policies
	shapes   []device.Shape
	// owned are the instances that were made for claims. reasons say why something is not offered in every shape. Both by the GPU's name.
	owned   map[string][]device.Instance
	reasons map[string][]string
}

// Preview says what the node offers by the rules.
func (r Rules) Preview(node nvidia.Node) (Preview, error) {
	p := Preview{Node: node, policies: r.Policies, owned: map[string][]device.Instance{}, reasons: map[string][]string{}}
	var held map[string]bool
	if r.Records != nil {
		var err error
		if held, err = r.Records.HeldShares(); err != nil {
			return p, fmt.Errorf("look which shares claims hold: %w", err)
		}
	}
	offerings := make([]device.Offering, len(node.GPUs))
	for i, g := range node.GPUs {
		name := g.WholeName()
		if r.Records != nil && g.MIG != nil {
			owned, err := r.Records.Explained(name, g.MIG.Instances)
			if err != nil {
				return p, fmt.Errorf("look which MIG instances of %s were made for claims: %w", name, err)
			}
			p.owned[name] = owned
		}
		layout, reason := device.Decide(g.GPU, p.owned[name], r.Policies.For(g.GPU), true)
		p.because(name, reason)
		offerings[i] = device.Offering{
			GPU: g.GPU, Layout: layout, Shares: r.Shares, NoFractions: device.WhyNoFractions(g.GPU, node.Driver), HeldShares: held,
		}
	}
	for name, why := range device.NotInFractions(offerings) {
		p.because(name, "not in fractions: "+why)
	}
	p.shapes = device.Offer(offerings)
	return p, nil
}

func (p Preview) because(gpu, reason string) {
	if reason != "" {
		p.reasons[gpu] = append(p.reasons[gpu], reason)
	}
}

// Empty says that nothing is offered at all.
func (p Preview) Empty() bool { return len(p.shapes) == 0 }

// madeFor says whose an instance is.
func (p Preview) madeFor(gpu string, in device.Instance) string {
	if slices.ContainsFunc(p.owned[gpu], func(o device.Instance) bool { return o.ID == in.ID }) {
		return "a claim"
	}
	return "an admin"
}

// offered counts the devices of a GPU by what they are, in the order in which they are published.
func (p Preview) offered(g device.GPU) (kinds []string, devices map[string]int) {
	devices = map[string]int{}
	for _, s := range p.shapes {
		if s.GPU().PCIAddress != g.PCIAddress {
			continue
		}
		k := kind(s, p.Node.Driver)
		if devices[k] == 0 {
			kinds = append(kinds, k)
		}
		devices[k]++
	}
	return kinds, devices
}

func kind(s device.Shape, d device.Driver) string {
	published := s.Device(d)
	of := "whole"
	if profile := published.Attributes["profile"].StringValue; profile != nil {
		of = *profile
	}
	shared, is := s.(device.Shared)
	switch {
	case !is:
		return of
	case shared.Ending():
		return of + " in shares that claims hold, no others"
	case shared.InFractions():
		return of + " in fractions"
	default:
		shares := published.Capacity[device.CapacityShares].Value
		return fmt.Sprintf("%s in %s shares", of, shares.String())
	}
}
