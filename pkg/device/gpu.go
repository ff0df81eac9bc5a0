package device

// GPU is one physical GPU as discovery found it. It holds no handle: it can be compared, printed and kept.
type GPU struct {
	// PCIAddress identifies the card's place in this node, and so its name.
	PCIAddress PCIAddress `json:"pciAddress"`
	// UUID is NVML's, with its "GPU-" prefix. Another UUID at the same place is another card.
	UUID string `json:"uuid"`
	// Minor is N of /dev/nvidiaN. It may change at every boot.
	Minor int `json:"minor"`

	ProductName           string `json:"productName"`
	Brand                 string `json:"brand"`
	Architecture          string `json:"architecture"`
	CUDAComputeCapability string `json:"cudaComputeCapability"` // "9.0"
	// AddressingMode is "HMM", "ATS" or "None", empty where the driver does not tell.
	AddressingMode string `json:"addressingMode,omitempty"`
	// MemoryBytes is 0 when the driver does not say, as for GPUs that work in the host's memory.
	MemoryBytes uint64 `json:"memoryBytes"`

	// PCIeRoot is the root complex as sysfs names it ("pci0000:00"), empty when unknown.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// NUMANode is nil when the platform does not say.
	NUMANode *int `json:"numaNode,omitempty"`
	// Engines is nil when the driver does not say.
	Engines *Engines `json:"engines,omitempty"`
	// ContainerLimits says that the driver and this node can hold a container as a whole to a part of the card's memory, as long as it is not cut.
	ContainerLimits bool `json:"containerLimits,omitempty"`
	// MIG is nil for a card that cannot be cut.
	MIG *MIG `json:"mig,omitempty"`
}

// Engines counts the units of a GPU that a partition takes a part of.
type Engines struct {
	Multiprocessors uint32 `json:"multiprocessors"`
	CopyEngines     uint32 `json:"copyEngines"`
	Decoders        uint32 `json:"decoders"`
	Encoders        uint32 `json:"encoders"`
	JPEGEngines     uint32 `json:"jpegEngines"`
	OFAEngines      uint32 `json:"ofaEngines"`
}

// Driver is the NVIDIA driver of a node, in its own spelling.
type Driver struct {
	Version     string `json:"version"`     // "580.65.06"
	CUDAVersion string `json:"cudaVersion"` // "13.0"
}

// WholeName is the name under which a GPU is offered as a whole: gpu-0000-1b-00-0.
func (g GPU) WholeName() string { return g.PCIAddress.WholeName() }
