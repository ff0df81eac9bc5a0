package device

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"regexp"
)

// GPU is one physical GPU as the last scan of the hardware reported it. It is plain data without
// any handle.
type GPU struct {
	// PCIAddress identifies the slot of the GPU in this node. The names of the GPU's devices come from
	// it, see [PCIAddress.WholeName].
	PCIAddress `json:"pciAddress"`
	// UUID is NVML's UUID, with its "GPU-" prefix. If the UUID at a PCI address changes, the card was
	// replaced.
	UUID string `json:"uuid"`
	// Minor is the N of the device node /dev/nvidiaN. It may change at every boot.
	Minor int `json:"minor"`

	ProductName           string `json:"productName"`
	Brand                 string `json:"brand"`
	Architecture          string `json:"architecture"`
	CUDAComputeCapability string `json:"cudaComputeCapability"` // "9.0"
	// AddressingMode is "HMM", "ATS" or "None". It is empty if the driver does not report it.
	AddressingMode string `json:"addressingMode,omitempty"`
	// MemoryBytes is 0 if the driver does not report the memory, as for GPUs that use the host's
	// memory.
	MemoryBytes uint64 `json:"memoryBytes"`

	// PCIeRoot is the root complex as sysfs names it ("pci0000:00"). It is empty if unknown.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// NUMANode is nil if the platform does not report the NUMA node.
	NUMANode *int `json:"numaNode,omitempty"`
	// Engines is nil if the driver does not report the numbers of engines.
	Engines *Engines `json:"engines,omitempty"`
	// ContainerLimits is true if the driver and the node can limit the GPU memory of a whole
	// container, not only of each process. This is possible only while the card is not in MIG mode.
	ContainerLimits bool `json:"containerLimits,omitempty"`
	// Passthrough is nil if the GPU cannot be passed to a virtual machine. Then NoPassthrough says
	// why. If both are empty, that is unknown.
	Passthrough   *Passthrough `json:"passthrough,omitempty"`
	NoPassthrough string       `json:"noPassthrough,omitempty"`
	// Firmware is nil where no GPU is offered to virtual machines.
	Firmware *Firmware `json:"firmware,omitempty"`
	// MIG has the GPU's MIG mode, profiles and instances. It is nil for a card without MIG.
	MIG *MIG `json:"mig,omitempty"`
}

// Model says in one line what cards of one model have in common and claims rely on: product name,
// memory and MIG profiles. It is empty if the product is unknown.
func (g GPU) Model() string {
	if g.ProductName == "" {
		return ""
	}
	profiles := "no MIG"
	if g.MIG != nil {
		table, _ := json.Marshal(g.MIG.Profiles) // numbers and texts: no error
		digest := sha256.Sum256(table)
		profiles = fmt.Sprintf("MIG profiles %x", digest[:8])
	}
	return fmt.Sprintf("%s, %d bytes, %s", g.ProductName, g.MemoryBytes, profiles)
}

// Engines counts the units of a GPU that are divided among its partitions.
type Engines struct {
	Multiprocessors uint32 `json:"multiprocessors"`
	CopyEngines     uint32 `json:"copyEngines"`
	Decoders        uint32 `json:"decoders"`
	Encoders        uint32 `json:"encoders"`
	JPEGEngines     uint32 `json:"jpegEngines"`
	OFAEngines      uint32 `json:"ofaEngines"`
}

// Firmware is what a virtual machine can change about a GPU so that it stays changed afterwards. A
// value that the driver does not report is empty.
type Firmware struct {
	VBIOS string `json:"vbios,omitempty"`
	// ECC is "enabled" or "disabled", as it will be after the next reset.
	ECC string `json:"ecc,omitempty"`
}

// Passthrough is what sysfs says about a GPU that can be passed to a virtual machine.
type Passthrough struct {
	VendorID uint16 `json:"vendorID"`
	DeviceID uint16 `json:"deviceID"`
	// AddressableMemory is how many bytes of address space the GPU's 64-bit memory regions take. A
	// virtual machine must reserve that much.
	AddressableMemory uint64 `json:"addressableMemory"`
	// IOMMUFD is true if the host's kernel has iommufd, the newer interface of VFIO.
	IOMMUFD bool `json:"iommufd,omitempty"`
	// BoundByAdmin is true if an admin bound the GPU to a VFIO driver. Such a GPU is offered to
	// virtual machines only, and never bound to another driver.
	BoundByAdmin bool `json:"boundByAdmin,omitempty"`
	// HasDriver is true if a kernel driver has the GPU: NVIDIA's, or one of VFIO.
	HasDriver bool `json:"hasDriver,omitempty"`
}

// PassthroughOnly reports whether NVML does not list the GPU, so that only sysfs says what it is,
// and nothing but a virtual machine can use it.
func (g GPU) PassthroughOnly() bool { return g.Passthrough != nil && g.UUID == "" }

// Driver has the versions of a node's NVIDIA driver, as the driver itself writes them.
type Driver struct {
	Version     string `json:"version"`     // "580.65.06"
	CUDAVersion string `json:"cudaVersion"` // "13.0"
}

// MIG is the MIG mode of a GPU, the profiles that the GPU supports, and the MIG instances that it
// has.
type MIG struct {
	// Enabled is the current MIG mode. Pending is the MIG mode after the next GPU reset. The two
	// differ only on cards that need a reset to change the mode.
	Enabled bool `json:"enabled"`
	Pending bool `json:"pending"`
	// ModeFixed is true if only a GPU reset changes the MIG mode, as on Ampere. Such a GPU is offered
	// as its current mode allows.
	ModeFixed bool `json:"modeFixed,omitempty"`
	// ReadOnly is true if MIG instances can be used but not created or destroyed here, as in a vGPU
	// guest.
	ReadOnly bool `json:"uncuttable,omitempty"`
	// Profiles lists the profiles that the GPU supports, sorted by ID.
	Profiles []Profile `json:"profiles,omitempty"`
	// Instances lists the MIG instances that exist on the GPU, sorted by ID.
	Instances []Instance `json:"instances,omitempty"`
}

// Profile is one kind of GPU instance that a GPU model supports, as nvidia-smi mig -lgip and -lgipp
// list it.
type Profile struct {
	// ID is the GPU instance profile's ID as the hardware reports it. The name is no identity: the
	// names of two profiles may differ only in "+me".
	ID uint32 `json:"id"`
	// Name is the profile's name without the prefix "MIG ": "1g.10gb", "1g.10gb+me".
	Name string `json:"name"`
	// Slices is the number of compute slices, such as the 1 of 1g.10gb.
	Slices       uint32 `json:"slices"`
	MaxInstances uint32 `json:"maxInstances"`
	MemoryBytes  uint64 `json:"memoryBytes"`
	Engines      `json:"engines"`
	// Size is how many memory slices an instance of this profile takes. Starts lists the memory slices
	// where an instance can begin, in ascending order.
	Size   uint32   `json:"size"`
	Starts []uint32 `json:"starts"`
}

// Placement is a range of memory slices.
type Placement struct {
	Start uint32 `json:"start"`
	Size  uint32 `json:"size"`
}

// Overlaps reports whether two placements share a memory slice.
func (p Placement) Overlaps(o Placement) bool {
	return uint64(p.Start) < uint64(o.Start)+uint64(o.Size) && uint64(o.Start) < uint64(p.Start)+uint64(p.Size)
}

// Instance is a GPU instance that exists on the hardware.
type Instance struct {
	// ID may be reused for another GPU instance after this one is destroyed.
	ID        uint32    `json:"id"`
	ProfileID uint32    `json:"profileID"`
	Placement Placement `json:"placement"`
	// Minor is the N of the GPU instance's capability device node /dev/nvidia-caps/nvidia-capN.
	Minor int `json:"minor"`
	// Compute has the compute instances, sorted by ID. A GPU instance created for a claim has exactly
	// one compute instance, which is as large as the GPU instance.
	Compute []ComputeInstance `json:"compute,omitempty"`
}

// ComputeInstance is the part of a GPU instance that a container uses. CUDA and nvidia-smi call it
// the MIG device.
type ComputeInstance struct {
	ID        uint32    `json:"id"`
	ProfileID uint32    `json:"profileID"`
	Placement Placement `json:"placement"`
	// Name is the name of the MIG device's profile: "1g.10gb", or "1c.3g.40gb" for a compute instance
	// that is smaller than its GPU instance.
	Name string `json:"name"`
	// Multiprocessors is the number of multiprocessors of this compute instance alone. All compute
	// instances of a GPU instance share its other engines.
	Multiprocessors uint32 `json:"multiprocessors"`
	// UUID is the UUID of the MIG device, with its "MIG-" prefix.
	UUID  string `json:"uuid"`
	Minor int    `json:"minor"`
}

// Profile returns the GPU's profile with that ID. The second result is false if the GPU has no such
// profile.
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

// partial matches the profile name of a compute instance that is smaller than its GPU instance,
// such as 1c.3g.40gb.
var partial = regexp.MustCompile(`^[0-9]+c\.`)

// IsPart reports whether the compute instance fills only a part of its GPU instance, as its name
// shows.
func (c ComputeInstance) IsPart() bool { return partial.MatchString(c.Name) }

// Contains reports whether n names the GPU instance i or a compute instance in it, existing or not.
func (i Instance) Contains(n PartitionName) bool {
	return n.ProfileID == i.ProfileID && n.Start == i.Placement.Start
}

// Part returns the compute instance of the GPU instance i that the device name n names. The second
// result is false if n names another GPU instance, or a compute instance that does not exist.
func (i Instance) Part(n PartitionName) (ComputeInstance, bool) {
	name := Name{Partition: &n}.String()
	for _, c := range i.Compute {
		if i.DeviceName("", c) == name {
			return c, true
		}
	}
	return ComputeInstance{}, false
}

// DeviceName returns the name of the device that the compute instance c of the GPU instance i is
// published as. gpu is the name of the GPU.
func (i Instance) DeviceName(gpu string, c ComputeInstance) string {
	n := i.partitionName(c)
	return Name{GPU: gpu, Partition: &n}.String()
}

// partitionName returns the name of the compute instance c of the GPU instance i. The name has c's
// ID only if c is smaller than i.
func (i Instance) partitionName(c ComputeInstance) PartitionName {
	n := PartitionName{ProfileID: i.ProfileID, Start: i.Placement.Start}
	if len(i.Compute) > 1 || c.IsPart() {
		n.Compute = &c.ID
	}
	return n
}
