package prepare

import (
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// Given is a device as a prepared claim has it.
type Given struct {
	checkpoint.Device

	// Instance and Compute are nil for a whole GPU, and for a partition that neither the record nor the inventory describes.
	Instance *device.Instance
	Compute  *device.ComputeInstance
}

// Prepared lists the claims that are prepared, as far as their records can be read.
func (p *Preparer) Prepared() ([]kubeletplugin.NamespacedObject, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	var claims []kubeletplugin.NamespacedObject
	for _, e := range entries {
		// One that cannot be read is reported where it matters; nothing can be said of what its claim has.
		if r, found, err := p.Records.Load(e.ClaimUID); err == nil && found && r.State == checkpoint.Prepared {
			claims = append(claims, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, UID: r.ClaimUID})
		}
	}
	return claims, nil
}

// Given lists the devices of a claim. There are none unless it is prepared. It asks no hardware.
func (p *Preparer) Given(claim types.UID) ([]Given, error) {
	r, found, err := p.Records.Load(claim)
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	if !found || r.State != checkpoint.Prepared {
		return nil, nil
	}
	steps, err := restore(r.Steps)
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	snapshot := p.Hardware.Snapshot()
	given := make([]Given, len(r.Devices))
	for i, d := range r.Devices {
		given[i] = Given{Device: d}
		if d.MIGUUID != "" {
			given[i].find(append(p.made(steps), cutOn(snapshot, d.GPU)...))
		}
	}
	return given, nil
}

// find looks for the MIG device by its place, profile and UUID.
func (g *Given) find(instances []device.Instance) {
	name, ok := device.ParseName(g.Device.Device)
	if !ok || name.Partition == nil {
		return
	}
	for _, in := range instances {
		if c, ok := in.Part(*name.Partition); ok && c.UUID == g.MIGUUID {
			g.Instance, g.Compute = &in, &c
			return
		}
	}
}

// made are the instances that the steps have made, for the claim or for all who share them.
func (p *Preparer) made(steps []Step) []device.Instance {
	var instances []device.Instance
	for _, step := range steps {
		if s, ok := step.(*shared); ok {
			held, err := s.load(p.Records, p.BootID)
			if err != nil {
				continue // the inventory may see it
			}
			step = held.step
		}
		if m, ok := step.(*migInstance); ok && m.Instance != nil {
			instances = append(instances, *m.Instance)
		}
	}
	return instances
}

// cutOn are the instances that the inventory sees on a GPU.
func cutOn(s inventory.Snapshot, gpu string) []device.Instance {
	for _, g := range s.Node.GPUs {
		if g.WholeName() == gpu && g.MIG != nil {
			return g.MIG.Instances
		}
	}
	return nil
}
