package device

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Partition is a part of a GPU: a place at which a GPU instance can be made when a claim needs it, or a MIG device that exists.
type Partition struct {
	gpu     GPU
	part    PartitionName
	profile string // as users write it: "1g.10gb", "1c.3g.40gb"
	uuid    string // empty for a place
	at      Placement
	// memory is 0 where the driver does not say.
	memory  uint64
	engines *Engines
	counts
}

var _ shareable = Partition{}

func (p Partition) Name() string { return p.name().String() }
func (p Partition) GPU() GPU     { return p.gpu }

// Device carries what a claim selects a partition by, and what it knows of the GPU around it.
func (p Partition) Device(d Driver) resourceapi.Device {
	attributes := common(p.gpu, d)
	attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("mig")}
	attributes["profile"] = text(p.profile)
	attributes["profileID"] = number(p.part.ProfileID)
	attributes["placementStart"] = number(p.at.Start)
	attributes["placementSize"] = number(p.at.Size)
	attributes["uuid"] = text(cmp.Or(p.uuid, NotCut))
	return resourceapi.Device{
		Name:             p.Name(),
		Attributes:       attributes,
		Capacity:         capacities(p.memory, p.engines),
		ConsumesCounters: p.cost.consumed(p.gpu.WholeName()),
	}
}

func (p Partition) partitionType() string { return named(p.profile, p.gpu) }

func (p Partition) name() Name            { return Name{GPU: p.gpu.WholeName(), Partition: &p.part} }
func (p Partition) memoryToShare() uint64 { return p.memory }

// ownCounter keeps a partition and its shares apart where no memory slice does.
func (p Partition) ownCounter() string {
	return strings.TrimPrefix(p.Name(), p.gpu.WholeName()+"-")
}

// named makes what is alike on all cards of a product one kind: partitions of one name cost other cards something else.
func named(what string, g GPU) string { return what + " of " + g.ProductName }

func number(n uint32) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{IntValue: ptr.To(int64(n))}
}

// places lists every placement of the profiles that are offered, in the order in which the
// scheduler should take them. Small profiles come first, and of profiles of one size those that
// take the least of what few can have: "+me" after plain.
//
// Of one profile's places those come first that leave most to others. On an H100 the first 1g goes to 6, where no 2g and no 4g could be, and the first 3g to
// 4, beside which a 4g still fits; the GPU's own driver, left to choose, does the same.
func places(g GPU, offered []string, set budget) []Partition {
	profiles := slices.Clone(g.MIG.Profiles)
	slices.SortStableFunc(profiles, func(p, q Profile) int {
		return cmp.Or(cmp.Compare(p.Slices, q.Slices), cmp.Compare(p.Size, q.Size), cmp.Compare(p.media(), q.media()), cmp.Compare(p.ID, q.ID))
	})
	var partitions []Partition
	for _, p := range profiles {
		if !offers(offered, p) {
			continue
		}
		starts := slices.Clone(p.Starts)
		slices.SortFunc(starts, func(x, y uint32) int {
			return cmp.Or(cmp.Compare(blocked(g, Placement{x, p.Size}), blocked(g, Placement{y, p.Size})), cmp.Compare(x, y))
		})
		for _, start := range slices.Compact(starts) {
			partitions = append(partitions, place(g, p, start, set))
		}
	}
	return partitions
}

func place(g GPU, p Profile, start uint32, set budget) Partition {
	at := Placement{start, p.Size}
	return Partition{
		gpu: g, part: PartitionName{ProfileID: p.ID, Start: start}, profile: p.Name, at: at,
		memory: p.MemoryBytes, engines: &p.Engines, counts: counts{set, set.cost(p, at)},
	}
}

// media counts the engines that a profile has besides those that compute.
func (p Profile) media() uint32 { return p.Decoders + p.Encoders + p.JPEGEngines + p.OFAEngines }

// blocked is how many placements cannot be used beside this one.
func blocked(g GPU, at Placement) int {
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

// existing lists the MIG devices of an instance, one for each compute instance. Without one there is nothing that a container could use.
func existing(g GPU, i Instance, set budget) []Partition {
	p, _ := g.Profile(i.ProfileID)
	p.ID = i.ProfileID
	var partitions []Partition
	for _, c := range i.Compute {
		s := Partition{gpu: g, part: i.partName(c), profile: c.Name, uuid: c.UUID, at: i.Placement}
		s.counts = counts{set, set.cost(p, i.Placement)}
		if s.part.Compute != nil {
			s.cost = set.costOfPart(p, c)
		}
		engines := p.Engines
		engines.Multiprocessors = c.Multiprocessors
		s.memory, s.engines = p.MemoryBytes, &engines
		partitions = append(partitions, s)
	}
	return partitions
}

// partition is the MIG device of that name, or the place where it can be made. It is false for one
// that the GPU neither has nor can have.
func (g GPU) partition(n PartitionName, set budget) (Partition, bool) {
	if g.MIG == nil {
		return Partition{}, false
	}
	name := Name{GPU: g.WholeName(), Partition: &n}.String()
	for _, i := range g.MIG.Instances {
		for _, p := range existing(g, i, set) {
			if p.Name() == name {
				return p, true
			}
		}
	}
	p, known := g.Profile(n.ProfileID)
	if !known || n.Compute != nil {
		return Partition{}, false
	}
	return place(g, p, n.Start, set), true
}
