// Package preview computes which devices a node would offer, from its hardware and the admin's
// configuration alone. It calls the same functions as the publisher, and neither hardware nor API
// server. Program gpu-kubelet-plugin inventory prints the offer of the node that it runs on, and
// kubectl gpu slices that of a node that does not exist yet.
package preview

import (
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Rules have what decides which devices a node offers: the admin's configuration and the devices
// that claims have.
type Rules struct {
	Policies device.Policies
	Shares   device.ShareRules
	// Records may be nil. Then the preview assumes that no claim has a device and an admin created all
	// MIG instances.
	Records Records
}

// Records reads from the claims' checkpoint records which devices claims have. Package prepare
// implements it.
type Records interface {
	// OwnedInstances returns the MIG instances that this driver created for claims, out of the
	// instances of the GPU named gpu.
	OwnedInstances(gpu string, instances []device.Instance) ([]device.Instance, error)
	// AllocatedDevices returns the devices that claims have.
	AllocatedDevices() (device.Allocations, error)
	// InUse reports whether a claim has the GPU or a part of it.
	InUse(gpu string) (bool, error)
	// InUseByContainers is like InUse, but a virtual machine that has the GPU does not count.
	InUseByContainers(gpu string) (bool, error)
}

// Offer is what a node would offer to a cluster with all DRA features. It is for people to read.
// A preview may be inconsistent, because the hardware and the claims' records are read at different
// moments.
type Offer struct {
	Node nvidia.Node
	// Holders has the processes that have a GPU open. They may prevent changes of its MIG mode and
	// instances.
	Holders map[device.PCIAddress][]nvidia.Process

	policies device.Policies
	shapes   []device.Shape
	// owned has the MIG instances that this driver created for claims. reasons says why less is
	// offered than the configuration asks for. The keys of both are the names of the GPUs.
	owned   map[string][]device.Instance
	reasons map[string][]string
	// unlisted says of the GPUs that NVML does not list whether virtual machines can get them.
	unlisted []string
}

// Offer returns what the node would offer under the rules.
func (r Rules) Offer(node nvidia.Node) (Offer, error) {
	p := Offer{Node: node, policies: r.Policies, owned: map[string][]device.Instance{}, reasons: map[string][]string{}}
	var held device.Allocations
	if r.Records != nil {
		var err error
		if held, err = r.Records.AllocatedDevices(); err != nil {
			return p, fmt.Errorf("list the devices that claims hold: %w", err)
		}
	}
	if err := p.addUnlisted(r); err != nil {
		return p, err
	}
	node = p.Node
	offerings := make([]device.Offering, len(node.GPUs))
	for i, g := range node.GPUs {
		name := g.WholeName()
		if r.Records != nil && g.MIG != nil {
			owned, err := r.Records.OwnedInstances(name, g.MIG.Instances)
			if err != nil {
				return p, fmt.Errorf("find the MIG instances of %s that were created for claims: %w", name, err)
			}
			p.owned[name] = owned
		}
		layout, reason := device.Decide(g.GPU, p.owned[name], r.Policies.For(g.GPU), true)
		p.addReason(name, reason)
		offerings[i] = device.Offering{
			GPU: g.GPU, Layout: layout, Shares: r.Shares,
			FractionsUnsupported: device.FractionsUnsupportedReason(g.GPU, node.Driver), HeldShares: held.Shared,
		}
	}
	for name, why := range device.FractionRefusals(offerings) {
		p.addReason(name, "not in fractions: "+why)
	}
	p.shapes = device.Offer(offerings)
	return p, nil
}

// Reasons has why a GPU offers less than the configuration asks for, by the name of the GPU.
func (p Offer) Reasons() map[string][]string { return p.reasons }

func (p Offer) addReason(gpu, reason string) {
	if reason != "" {
		p.reasons[gpu] = append(p.reasons[gpu], reason)
	}
}

// Empty reports whether the node would publish no device.
func (p Offer) Empty() bool { return len(p.shapes) == 0 }

// Devices returns the names of the devices that the node would publish.
func (p Offer) Devices() []device.Name {
	var names []device.Name
	for _, s := range p.shapes {
		if n, ok := device.ParseName(s.Name()); ok {
			names = append(names, n)
		}
	}
	return names
}

// ownerOf returns the text that the table shows for who created the MIG instance.
func (p Offer) ownerOf(gpu string, in device.Instance) string {
	if slices.ContainsFunc(p.owned[gpu], func(o device.Instance) bool { return o.ID == in.ID }) {
		return "a claim"
	}
	return "an admin"
}

// offered counts the devices that a GPU would publish. devices maps each kind of device to its
// number, and kinds lists the kinds in publishing order.
func (p Offer) offered(g device.GPU) (kinds []string, devices map[string]int) {
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
	if _, passed := s.(device.VFIO); passed {
		of = "whole for a virtual machine"
	}
	if profile := published.Attributes["profile"].StringValue; profile != nil {
		of = *profile
	}
	shared, is := s.(device.Shared)
	switch {
	case !is:
		return of
	case shared.Withdrawn():
		return of + " in shares that claims hold, no new ones"
	case shared.InFractions():
		return of + " in fractions"
	default:
		shares := published.Capacity[device.CapacityShares].Value
		return fmt.Sprintf("%s in %s shares", of, shares.String())
	}
}
