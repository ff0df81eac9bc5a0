package device

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Partition is a part of a GPU that is offered as one device. It is either a placement where a GPU
// instance can be created for a claim, or an existing MIG device.
type Partition struct {
	gpu     GPU
	part    PartitionName
	profile string // as users write it: "1g.10gb", "1c.3g.40gb"
	uuid    string // empty for a placement without an instance
	at      Placement
	// memory is in bytes. It is 0 if the driver does not report the memory.
	memory  uint64
	engines *Engines
	counts
}

var _ shareable = Partition{}

func (p Partition) Name() string { return p.name().String() }
func (p Partition) GPU() GPU     { return p.gpu }

// Profile returns the name of the partition's profile as users write it, such as 1g.10gb.
func (p Partition) Profile() string { return p.profile }

// Attributes returns the attributes by which a claim selects a partition, and those of its GPU.
func (p Partition) Attributes(d Driver) Attributes {
	a := commonAttributes(p.gpu, d)
	a["type"] = text("mig")
	a["profile"] = text(p.profile)
	a["profileID"] = number(p.part.ProfileID)
	a["placementStart"] = number(p.at.Start)
	a["placementSize"] = number(p.at.Size)
	a["uuid"] = text(cmp.Or(p.uuid, UUIDNotCreated))
	return a
}

func (p Partition) Device(d Driver) resourceapi.Device {
	return resourceapi.Device{
		Name:             p.Name(),
		Attributes:       p.Attributes(d),
		Capacity:         capacities(p.memory, p.engines),
		ConsumesCounters: p.cost.consumed(p.gpu.WholeName()),
	}
}

func (p Partition) partitionType() string { return perProduct(p.profile, p.gpu) }

func (p Partition) name() Name            { return Name{GPU: p.gpu.WholeName(), Partition: &p.part} }
func (p Partition) memoryToShare() uint64 { return p.memory }

// ownCounter returns the name of a counter that only this partition and its shares consume. It
// makes them exclude each other if the partition uses up no other counter.
func (p Partition) ownCounter() string {
	return strings.TrimPrefix(p.Name(), p.gpu.WholeName()+"-")
}

// placementsOf returns a Partition for every placement of the offered profiles, in publishing
// order. Small profiles come first. Of two profiles of one size, the one with fewer media engines
// comes first, so a plain profile comes before its "+me" variant.
func placementsOf(g GPU, offered []string, set budget) []Partition {
	profiles := slices.Clone(g.MIG.Profiles)
	slices.SortStableFunc(profiles, func(p, q Profile) int {
		return cmp.Or(
			cmp.Compare(p.Slices, q.Slices), cmp.Compare(p.Size, q.Size),
			cmp.Compare(p.mediaEngines(), q.mediaEngines()), cmp.Compare(p.ID, q.ID),
		)
	})
	var partitions []Partition
	for _, p := range profiles {
		if !offersProfile(offered, p) {
			continue
		}
		// Placements that leave the most room for others come first. On an H100 the first 1g starts at
		// memory slice 6, where no 2g or 4g fits. The first 3g starts at 4, so that a 4g still fits.
		// NVIDIA's GPU driver chooses the same placements.
		starts := slices.Clone(p.Starts)
		slices.SortFunc(starts, func(x, y uint32) int {
			return cmp.Or(
				cmp.Compare(conflictingPlacements(g, Placement{x, p.Size}), conflictingPlacements(g, Placement{y, p.Size})),
				cmp.Compare(x, y),
			)
		})
		for _, start := range slices.Compact(starts) {
			partitions = append(partitions, placementOf(g, p, start, set))
		}
	}
	return partitions
}

func placementOf(g GPU, p Profile, start uint32, set budget) Partition {
	at := Placement{start, p.Size}
	return Partition{
		gpu: g, part: PartitionName{ProfileID: p.ID, Start: start}, profile: p.Name, at: at,
		memory: p.MemoryBytes, engines: &p.Engines, counts: counts{set, set.cost(p, at)},
	}
}

// mediaEngines returns the number of the profile's engines that are not for computing.
func (p Profile) mediaEngines() uint32 { return p.Decoders + p.Encoders + p.JPEGEngines + p.OFAEngines }

// conflictingPlacements returns how many placements of all of the GPU's profiles overlap with the
// given placement.
func conflictingPlacements(g GPU, at Placement) int {
	n := 0
	for _, p := range g.MIG.Profiles {
		for _, start := range p.Starts {
			if at.Overlaps(Placement{start, p.Size}) {
				n++
			}
		}
	}
	return n
}

// migDevices returns a Partition for each compute instance of the GPU instance i. It returns none
// if i has no compute instance, because then no container can use i.
func migDevices(g GPU, i Instance, set budget) []Partition {
	p, _ := g.Profile(i.ProfileID)
	p.ID = i.ProfileID
	var partitions []Partition
	for _, c := range i.Compute {
		s := Partition{gpu: g, part: i.partitionName(c), profile: c.Name, uuid: c.UUID, at: i.Placement}
		s.counts = counts{set, set.cost(p, i.Placement)}
		if s.part.Compute != nil {
			s.cost = set.computeInstanceCost(p, c)
		}
		engines := p.Engines
		engines.Multiprocessors = c.Multiprocessors
		s.memory, s.engines = p.MemoryBytes, &engines
		partitions = append(partitions, s)
	}
	return partitions
}

// partition returns the existing MIG device of the GPU that n names, or else the placement that n
// names and where a MIG instance can be created. The second result is false if the GPU has neither.
func (g GPU) partition(n PartitionName, set budget) (Partition, bool) {
	if g.MIG == nil {
		return Partition{}, false
	}
	name := Name{GPU: g.WholeName(), Partition: &n}.String()
	for _, i := range g.MIG.Instances {
		for _, p := range migDevices(g, i, set) {
			if p.Name() == name {
				return p, true
			}
		}
	}
	p, known := g.Profile(n.ProfileID)
	if !known || n.Compute != nil {
		return Partition{}, false
	}
	return placementOf(g, p, n.Start, set), true
}
