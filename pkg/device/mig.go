package device

import "regexp"

// MIG is what a GPU can be cut into, and how it is cut now. A GPU that cannot be cut has none.
type MIG struct {
	// Enabled is the mode in force, Pending the one after the GPU's next reset. They differ only on cards that need a reset to change it.
	Enabled bool `json:"enabled"`
	Pending bool `json:"pending"`
	// ModeFixed says that only a reset of the GPU changes the mode, as on Ampere: then the GPU is offered in the shapes of its current mode.
	ModeFixed bool `json:"modeFixed,omitempty"`
	// Uncuttable says that instances can be used but neither made nor removed here, as in a vGPU guest.
	Uncuttable bool `json:"uncuttable,omitempty"`
	// Profiles in the order of their IDs.
	Profiles []Profile `json:"profiles,omitempty"`
	// Instances in the order of their IDs.
	Instances []Instance `json:"instances,omitempty"`
}

// Profile is one kind of GPU instance that a model can be cut into, as nvidia-smi mig -lgip and -lgipp list it.
type Profile struct {
	// ID is the GPU instance profile's ID, as the hardware reports it: two profiles may differ in nothing of their names but "+me".
	ID uint32 `json:"id"`
	// Name is the profile's without the "MIG " in front: "1g.10gb", "1g.10gb+me".
	Name string `json:"name"`
	// Slices counts compute slices, the "1" of 1g.10gb.
	Slices       uint32 `json:"slices"`
	MaxInstances uint32 `json:"maxInstances"`
	MemoryBytes  uint64 `json:"memoryBytes"`
	Engines      `json:"engines"`
	// Size is how many memory slices an instance takes, Starts where it can begin, in ascending order.
	Size   uint32   `json:"size"`
	Starts []uint32 `json:"starts"`
}

// Placement is a range of memory slices.
type Placement struct {
	Start uint32 `json:"start"`
	Size  uint32 `json:"size"`
}

// Overlaps says whether two placements cannot exist side by side.
func (p Placement) Overlaps(o Placement) bool {
	return uint64(p.Start) < uint64(o.Start)+uint64(o.Size) && uint64(o.Start) < uint64(p.Start)+uint64(p.Size)
}

// Instance is a GPU instance that exists on the hardware.
type Instance struct {
	// ID is used again after the instance is destroyed.
	ID        uint32    `json:"id"`
	ProfileID uint32    `json:"profileID"`
	Placement Placement `json:"placement"`
	// Minor is that of the instance's capability node, N of /dev/nvidia-caps/nvidia-capN.
	Minor int `json:"minor"`
	// Compute instances in the order of their IDs. One that was made for a claim has exactly one, which is as large as the GPU instance.
	Compute []ComputeInstance `json:"compute,omitempty"`
}

// ComputeInstance is what a container uses of a GPU instance: to CUDA and nvidia-smi it is the MIG device.
type ComputeInstance struct {
	ID        uint32    `json:"id"`
	ProfileID uint32    `json:"profileID"`
	Placement Placement `json:"placement"`
	// Name is the MIG device's profile: "1g.10gb", or "1c.3g.40gb" for a part of a GPU instance.
	Name string `json:"name"`
	// Engines that the compute instance may use; a part of a GPU instance shares the others with its neighbours.
	Multiprocessors uint32 `json:"multiprocessors"`
	// UUID is the MIG device's, with its "MIG-" prefix.
	UUID  string `json:"uuid"`
	Minor int    `json:"minor"`
}

// Profile finds a profile of the GPU by its ID.
func (g GPU) Profile(id uint32) (Profile, bool) {
	if g.MIG != nil {
		for _, p := range g.MIG.Profiles {
			if p.ID == id {
				return p, true
			}
		}
	}
	return Profile{}, false
}

// partial is the name of a compute instance that is less than its GPU instance: 1c.3g.40gb.
var partial = regexp.MustCompile(`^[0-9]+c\.`)

// Part finds the compute instance that a container uses which is given that part of the GPU. It is false if this is not the instance that is meant, or if
// what is meant is not in it.
func (i Instance) Part(n PartitionName) (ComputeInstance, bool) {
	if i.ProfileID != n.ProfileID || i.Placement.Start != n.Start {
		return ComputeInstance{}, false
	}
	for _, c := range i.Compute {
		if own := i.partName(c); own.Compute == nil && n.Compute == nil || own.Compute != nil && n.Compute != nil && *own.Compute == *n.Compute {
			return c, true
		}
	}
	return ComputeInstance{}, false
}

// partName names what the compute instance makes usable: all of the GPU instance, or a part of it.
func (i Instance) partName(c ComputeInstance) PartitionName {
	n := PartitionName{ProfileID: i.ProfileID, Start: i.Placement.Start}
	if len(i.Compute) > 1 || partial.MatchString(c.Name) {
		n.Compute = &c.ID
	}
	return n
}
