package device

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

// Driver has the versions of a node's NVIDIA driver, as the driver itself writes them.
type Driver struct {
	Version     string `json:"version"`     // "580.65.06"
	CUDAVersion string `json:"cudaVersion"` // "13.0"
}
