package device

// Card identifies a GPU for an operation on the hardware. If the GPU at this PCI address has a
// different UUID, the card was replaced, so the operation must not change it.
type Card struct {
	PCIAddress PCIAddress `json:"pciAddress"`
	UUID       string     `json:"uuid"`
}

func (c Card) String() string { return c.PCIAddress.WholeName() + " (" + c.UUID + ")" }

// Card returns what identifies the GPU for operations on the hardware.
func (g GPU) Card() Card { return Card{PCIAddress: g.PCIAddress, UUID: g.UUID} }

// CardState has the MIG layout and the settings of a card at the moment of a query.
type CardState struct {
	// Minor is the N of the device node /dev/nvidiaN. Each query reads it, because a change of the MIG
	// mode may change it.
	Minor int `json:"minor"`
	// MIG has only the fields Enabled, Pending and Instances set. The profiles are in the inventory's
	// snapshot.
	MIG MIG `json:"mig"`
	// ComputeMode is empty if the driver does not report the compute mode.
	ComputeMode ComputeMode `json:"computeMode,omitempty"`
}

// FailureCode says why an operation on the hardware failed.
type FailureCode string

const (
	FailureInUse        FailureCode = "in-use"       // a process has the GPU or the MIG instance open
	FailureInsufficient FailureCode = "insufficient" // the placement is occupied
	FailureNotFound     FailureCode = "not-found"    // no such GPU, profile or MIG instance
	// FailureNotSupported means that this GPU, driver or vGPU guest does not support the operation.
	FailureNotSupported FailureCode = "not-supported"
	FailureNoPermission FailureCode = "no-permission" // the plugin lacks a permission
	// FailureReset means that only a GPU reset can change the MIG mode. The operation changed nothing.
	FailureReset FailureCode = "reset-required"
	// FailureNoDriver means that the kernel driver is not loaded, so the GPU has no MIG instances.
	FailureNoDriver FailureCode = "no-driver"
	FailureLost     FailureCode = "lost"     // the GPU no longer answers
	FailureReplaced FailureCode = "replaced" // another card is at the PCI address
	// FailureChanged means that a MIG instance with the given ID exists, but is not the one that the
	// caller expected. NVIDIA's driver reuses the IDs of destroyed instances.
	FailureChanged FailureCode = "changed"
	// FailureDied means that the worker process, which calls NVML, ended during the operation. It is
	// unknown whether the operation changed the hardware.
	FailureDied FailureCode = "died"
	// FailureTimeout means that the operation did not end before the deadline of its context. It is
	// unknown whether it changed the hardware.
	FailureTimeout FailureCode = "timeout"
	FailureOther   FailureCode = "other"
)

// ComputeMode says how many processes may use a GPU at once.
type ComputeMode string

const (
	// ComputeDefault lets any number of processes use the GPU.
	ComputeDefault ComputeMode = "default"
	// ComputeExclusiveProcess lets only one process use the GPU: the MPS server, through which the
	// other processes use the GPU. The mode does not exist in MIG mode.
	ComputeExclusiveProcess ComputeMode = "exclusive-process"
	// ComputeProhibited lets no process use the GPU.
	ComputeProhibited ComputeMode = "prohibited"
)

// TimeSlice says how long a process computes before the next process runs. The values are those of
// nvidia-smi compute-policy.
type TimeSlice int

const (
	TimeSliceDefault TimeSlice = iota
	TimeSliceShort
	TimeSliceMedium
	TimeSliceLong
)
