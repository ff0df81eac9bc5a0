package state

import (
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// cut gives a new GPU the MIG mode and MIG instances from its node file. It returns an error for a
// placement that is not possible, but does not count engines; the library does.
func (g *GPU) cut(m *Model, mig *model.CardMIG, bySyspipe bool) error {
	if mig == nil {
		return nil
	}
	if m.MIGSupported == 0 {
		return fmt.Errorf("GPU model %s does not support MIG", Text(m.Name[:]))
	}
	g.MIGCurrent = flag(mig.Enabled)
	g.MIGPending = g.MIGCurrent
	if mig.Pending != nil {
		g.MIGPending = flag(*mig.Pending)
	}
	if len(mig.Instances) > 0 && !mig.Enabled {
		return fmt.Errorf("MIG instances without MIG mode")
	}
	var taken uint64
	for _, instance := range mig.Instances {
		profile, known := m.Profile(instance.Profile)
		if !known || !slices.Contains(profile.PlacementStarts[:profile.PlacementCount], instance.Start) {
			return fmt.Errorf("no GPU instance profile %d that starts at %d", instance.Profile, instance.Start)
		}
		memory := (uint64(1)<<profile.PlacementSize - 1) << instance.Start
		if taken&memory != 0 {
			return fmt.Errorf("GPU instance of profile %d at %d overlaps with another", instance.Profile, instance.Start)
		}
		taken |= memory
		id := m.instanceID(profile, instance.Start)
		if id >= gpuInstances || g.Instances[id] != 0 {
			return fmt.Errorf("no ID for a GPU instance of profile %d at %d", instance.Profile, instance.Start)
		}
		g.Instances[id] = Instance{Profile: profile.ID, Start: instance.Start, Size: profile.PlacementSize}.pack()
		if err := g.divide(m, id, profile, instance.Compute, bySyspipe); err != nil {
			return fmt.Errorf("GPU instance of profile %d at %d: %w", instance.Profile, instance.Start, err)
		}
	}
	return nil
}

// computeCount returns how many compute instances the GPU has.
func (g *GPU) computeCount() (n uint32) {
	for id := range uint32(gpuInstances) {
		n += uint32(len(g.OfInstance(id)))
	}
	return n
}

// instanceID returns the ID of the GPU instance that starts at memory slice start. As in the
// library, a GPU instance with a larger share of the memory has a lower ID; with equal shares, IDs
// follow start.
func (m *Model) instanceID(profile *Profile, start uint32) uint32 {
	for parts := uint32(8); parts >= 1; parts /= 2 {
		if span := m.MemorySlices / parts; span > 0 && span >= profile.PlacementSize {
			return parts - 1 + start/span
		}
	}
	return gpuInstances
}

// divide creates the compute instances of GPU instance id. ids are their profile IDs; nil means one
// compute instance that fills the GPU instance. With bySyspipe each gets the next syspipe.
func (g *GPU) divide(m *Model, id uint32, profile *Profile, ids *[]uint32, bySyspipe bool) error {
	var of []CIProfile
	for _, c := range m.CIProfiles[:m.CIProfileCount] {
		if c.GISlices != profile.Slices {
			continue
		}
		if c.Slices == profile.Slices && profile.WholeCI != Absent {
			c.ID = profile.WholeCI
		}
		if ids == nil && c.Slices == profile.Slices {
			ids = &[]uint32{c.ID}
		}
		of = append(of, c)
	}
	if ids == nil {
		return fmt.Errorf("no compute instance profile fills the GPU instance")
	}
	var taken uint64
	for i, want := range *ids {
		at := slices.IndexFunc(of, func(c CIProfile) bool { return c.ID == want })
		if at < 0 || i >= computeInstances {
			return fmt.Errorf("no room for a compute instance of profile %d", want)
		}
		c := of[at]
		place := slices.IndexFunc(
			c.PlacementStarts[:c.PlacementCount],
			func(start uint32) bool { return taken&((uint64(1)<<c.Slices-1)<<start) == 0 },
		)
		if place < 0 {
			return fmt.Errorf("no room for a compute instance of profile %d", want)
		}
		start := c.PlacementStarts[place]
		taken |= (uint64(1)<<c.Slices - 1) << start
		made := Instance{Profile: want, Start: start, Size: c.Slices}
		if bySyspipe {
			made.Syspipe = 1 + g.computeCount()
		}
		g.ComputeInstances[id][i] = made.pack()
	}
	return nil
}
