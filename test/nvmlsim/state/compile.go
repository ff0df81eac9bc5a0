package state

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"unsafe"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// idleShareOfPower divides a GPU's power limit to get the power that it draws when idle. Only
// displays show the result.
const idleShareOfPower = 10

func putString(to []byte, from, what string) error {
	if len(from) >= len(to) {
		return fmt.Errorf("%s %q is longer than %d bytes", what, from, len(to)-1)
	}
	clear(to)
	copy(to, from)
	return nil
}

// Text returns the string in a fixed-size, zero-terminated field.
func Text(field []byte) string {
	text, _, _ := bytes.Cut(field, []byte{0})
	return string(text)
}

func flag(on bool) uint32 {
	if on {
		return 1
	}
	return 0
}

func compileModel(m *model.GPU, to *Model) error {
	*to = Model{
		Brand:           m.Brand.NVMLValue,
		Architecture:    m.Architecture.NVMLValue,
		Multiprocessors: m.Multiprocessors.Value,
		ECC:             flag(m.ECC.Value),
		PowerLimitMW:    Absent,
		PowerIdleMW:     Absent,
		BAR1MiB:         Absent,
		MIGSupported:    flag(m.MIG.Supported.Value),
		MIGMaxInstances: m.MIG.MaxInstances.Value,
		MIGNeedsReset:   flag(m.MIG.NeedsReset.Value),
		MemorySlices:    m.MIG.MemorySlices,
		MemoryMiB:       m.MemoryTotalMiB.Value,
	}
	if m.PowerLimitWatts.Known {
		to.PowerLimitMW = m.PowerLimitWatts.Value * 1000
		to.PowerIdleMW = to.PowerLimitMW / idleShareOfPower
	}
	if m.BAR1MiB.Known {
		to.BAR1MiB = m.BAR1MiB.Value
	}
	to.TimeSlices = flag(m.HasTimeSlices())
	var err error
	if to.EventTypes, err = m.EventTypes(); err != nil {
		return err
	}
	if to.CCMajor, to.CCMinor, err = m.ComputeCapability(); err != nil {
		return err
	}
	if to.PCIDeviceID, err = model.ParsePCIID(m.PCIDeviceID.Value); err != nil {
		return err
	}
	if to.PCISubsystemID, err = model.ParsePCIID(m.PCISubsystemID.Value); err != nil {
		return err
	}
	if to.AddressingMode, err = m.AddressingModeValue(); err != nil {
		return err
	}
	if err := putString(to.Key[:], m.Key, "model file name"); err != nil {
		return err
	}
	if err := putString(to.Name[:], m.ProductName.Value, "productName"); err != nil {
		return err
	}
	if err := compileProfiles(m, to); err != nil {
		return err
	}
	return compileCIProfiles(m, to)
}

func compileProfiles(m *model.GPU, to *Model) error {
	if len(m.MIG.Profiles) > maxProfiles {
		return fmt.Errorf("%d GPU instance profiles; the state file has room for %d", len(m.MIG.Profiles), maxProfiles)
	}
	for i, from := range m.MIG.Profiles {
		value, err := from.NVMLValue()
		if err != nil {
			return err
		}
		if len(from.Placements.Starts) > maxPlacements {
			return fmt.Errorf("profile %q: %d placements; the state file has room for %d", from.Name, len(from.Placements.Starts), maxPlacements)
		}
		p := &to.Profiles[i]
		*p = Profile{
			NVMLProfile: value, ID: from.ID, Slices: from.Slices, InstancesMax: from.InstancesMax,
			P2P: flag(from.P2P == "Yes"), SM: from.SM, CopyEngines: from.CopyEngines, Decoders: from.Decoders,
			Encoders: from.Encoders, JPEGEngines: from.JPEGEngines, OFAEngines: from.OFAEngines,
			PlacementSize: from.Placements.Size, PlacementCount: uint32(len(from.Placements.Starts)), MemoryMiB: from.MemoryMiB,
			WholeCI: Absent,
		}
		if from.WholeComputeProfile.Known {
			p.WholeCI = from.WholeComputeProfile.Value
		}
		copy(p.PlacementStarts[:], from.Placements.Starts)
		if err := putString(p.Name[:], from.Name, "profile name"); err != nil {
			return err
		}
	}
	to.ProfileCount = uint32(len(m.MIG.Profiles))
	return nil
}

// ciSlices maps each NVML_COMPUTE_INSTANCE_PROFILE_* value to the profile's number of slices.
var ciSlices = []uint32{0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1}

func compileCIProfiles(m *model.GPU, to *Model) error {
	for _, slices := range []uint32{1, 2, 3, 4, 6, 7, 8} {
		for _, from := range m.MIG.Compute.PerGPUInstance[fmt.Sprintf("%dg", slices)].Profiles {
			if to.CIProfileCount == maxCIProfiles || from.ID >= uint32(len(ciSlices)) {
				return fmt.Errorf("compute instance profile %q (ID %d) does not fit the state file", from.Name, from.ID)
			}
			c := &to.CIProfiles[to.CIProfileCount]
			*c = CIProfile{GISlices: slices, ID: from.ID, Slices: ciSlices[from.ID], InstancesMax: from.InstancesMax, SM: from.SM}
			for start := uint32(0); start+c.Slices <= slices && c.PlacementCount < 8; start += ciStep(c.Slices) {
				c.PlacementStarts[c.PlacementCount] = start
				c.PlacementCount++
			}
			to.CIProfileCount++
		}
	}
	return nil
}

// ciStep returns the distance between possible starts of a compute instance with this many slices.
// For example, one with 3 slices starts at 0 or 4.
func ciStep(slices uint32) uint32 {
	if slices == 3 {
		return 4
	}
	return slices
}

// pathNumber computes a number from a path through the PCI tree. Equal paths get equal numbers, and
// an empty path gets 0.
func pathNumber(path ...string) uint32 {
	if len(path) == 0 {
		return 0
	}
	sum := fnv.New32a()
	for _, part := range path {
		_, _ = sum.Write([]byte(part + "/"))
	}
	return sum.Sum32()
}

func compileCard(card model.Card, modelIndex uint32, to *GPU) error {
	address, err := model.ParsePCIAddress(card.PCI)
	if err != nil {
		return err
	}
	*to = GPU{
		Model: modelIndex, Minor: *card.Minor, PCIDomain: address.Domain, PCIBus: address.Bus, PCIDevice: address.Device,
		NUMANode: card.NUMANode, PCIRoot: pathNumber(card.PCIRoot), PCISwitch: pathNumber(card.Bridges...), ModuleID: *card.Module, Present: 1,
	}
	to.bind(bindingAtBoot(card))
	if card.NoMemoryInfo {
		to.NoMemoryInfo = 1
	}
	if card.Fabric != nil {
		if to.FabricState, err = card.Fabric.StateValue(); err != nil {
			return err
		}
		if to.FabricCluster, err = card.Fabric.Cluster(); err != nil {
			return err
		}
		to.FabricClique = card.Fabric.CliqueID
	}
	if to.Virtualization, err = card.VirtualizationValue(); err != nil {
		return err
	}
	if err := putString(to.Serial[:], card.Serial, "serial"); err != nil {
		return err
	}
	return putString(to.UUID[:], card.UUID, "uuid")
}

// Spec is everything that Create needs to write a state file.
type Spec struct {
	Node          *model.Node
	Models        map[string]*model.GPU
	DriverVersion string
	CUDAVersion   string
	Seed          string
}

// usedModels returns the models of the node's GPUs in the order of first use, and the position of
// each model by key.
func (s Spec) usedModels() ([]*model.GPU, map[string]uint32, error) {
	var used []*model.GPU
	index := map[string]uint32{}
	for _, card := range s.Node.GPUs {
		if _, seen := index[card.Model]; seen {
			continue
		}
		m, ok := s.Models[card.Model]
		if !ok {
			return nil, nil, fmt.Errorf("GPU at %s: no model file %s.yaml", card.PCI, card.Model)
		}
		index[card.Model] = uint32(len(used))
		used = append(used, m)
	}
	return used, index, nil
}

// shape returns the header fields that define the file's format: struct sizes, table lengths and
// table offsets. Two builds can share a state file only if these are equal.
func (h *Header) shape() [15]uint64 {
	return [...]uint64{
		uint64(h.Layout), uint64(h.HeaderSize), uint64(h.ModelSize), uint64(h.GPUSize), uint64(h.EventSize), uint64(h.FaultSize),
		uint64(h.ModelCount), uint64(h.GPUCount), uint64(h.EventCount), uint64(h.FaultCount),
		h.ModelOffset, h.GPUOffset, h.EventOffset, h.FaultOffset, h.TotalSize,
	}
}

func align(n uint64) uint64 { return (n + 63) &^ 63 }

// size sets the sizes, lengths and offsets in the header. In the state file the tables follow the
// header.
func (h *Header) size(models, gpus int) {
	h.Magic, h.Layout = Magic, Layout
	h.HeaderSize = uint32(unsafe.Sizeof(Header{}))
	h.ModelSize = uint32(unsafe.Sizeof(Model{}))
	h.GPUSize = uint32(unsafe.Sizeof(GPU{}))
	h.EventSize = uint32(unsafe.Sizeof(Event{}))
	h.FaultSize = uint32(unsafe.Sizeof(Fault{}))
	h.ModelCount, h.GPUCount = uint32(models), uint32(gpus)
	h.EventCount, h.FaultCount = eventCapacity, faultCapacity
	h.ModelOffset = align(uint64(h.HeaderSize))
	h.GPUOffset = align(h.ModelOffset + uint64(h.ModelCount)*uint64(h.ModelSize))
	h.EventOffset = align(h.GPUOffset + uint64(h.GPUCount)*uint64(h.GPUSize))
	h.FaultOffset = align(h.EventOffset + uint64(h.EventCount)*uint64(h.EventSize))
	h.TotalSize = align(h.FaultOffset + uint64(h.FaultCount)*uint64(h.FaultSize))
}
