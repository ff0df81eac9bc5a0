package device

// DeviceNames are the names of all devices that the GPU can be or is: itself, every placement, and parts of instances that exist.
func (g GPU) DeviceNames() []string {
	whole := g.WholeName()
	names := []string{whole}
	if g.MIG == nil {
		return names
	}
	seen := map[string]bool{}
	add := func(p PartitionName) {
		name := Name{GPU: whole, Partition: &p}.String()
		if !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, p := range g.MIG.Profiles {
		for _, start := range p.Starts {
			add(PartitionName{ProfileID: p.ID, Start: start})
		}
	}
	for _, i := range g.MIG.Instances {
		for _, c := range i.Compute {
			add(i.partName(c))
		}
	}
	return names
}
