package prepare

import (
	"k8s.io/apimachinery/pkg/types"

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
			given[i].find(append(made(steps), cutOn(snapshot, d.GPU)...))
		}
	}
	return given, nil
}

// find looks for the MIG device by its UUID.
func (g *Given) find(instances []device.Instance) {
	for _, in := range instances {
		for _, c := range in.Compute {
			if c.UUID == g.MIGUUID {
				g.Instance, g.Compute = &in, &c
				return
			}
		}
	}
}

// made are the instances that the steps have made.
func made(steps []Step) []device.Instance {
	var instances []device.Instance
	for _, s := range steps {
		if m, ok := s.(*migInstance); ok && m.Instance != nil {
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
