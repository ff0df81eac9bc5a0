package device

import "time"

// Signal is one fact about the health of a GPU, or a report of the watcher process that queries the
// GPUs. Exactly one field is set. Package health decides what the signal means for the health of
// devices.
type Signal struct {
	Event     *HealthEvent  `json:"event,omitempty"`
	Condition *Condition    `json:"condition,omitempty"`
	Watcher   *WatcherState `json:"watcher,omitempty"`
}

// EventKind is a type of NVML event about health.
type EventKind string

const (
	EventXID              EventKind = "xid"               // nvmlEventTypeXidCriticalError
	EventDoubleBitECC     EventKind = "double-bit-ecc"    // nvmlEventTypeDoubleBitEccError
	EventSingleBitStorm   EventKind = "single-bit-storm"  // nvmlEventTypeSingleBitEccErrorStorm
	EventRetirement       EventKind = "retirement"        // nvmlEventTypeDramRetirementEvent
	EventRetirementFailed EventKind = "retirement-failed" // nvmlEventTypeDramRetirementFailure
	EventPoison           EventKind = "poison"            // nvmlEventTypeNonFatalPoisonError
	EventFatalPoison      EventKind = "fatal-poison"      // nvmlEventTypeFatalPoisonError
	EventUnavailable      EventKind = "unavailable"       // nvmlEventTypeGpuUnavailableError
	EventRecoveryAction   EventKind = "recovery-action"   // nvmlEventTypeGpuRecoveryAction
)

// HealthEvent is an event that the hardware reported through NVML without a query.
type HealthEvent struct {
	Card Card      `json:"card"`
	Kind EventKind `json:"kind"`
	// XID is the XID code of an event of kind [EventXID].
	XID uint64 `json:"xid,omitempty"`
	// Recovery is the recovery action that an event of kind [EventRecoveryAction] reported. It is
	// [RecoveryUnknown] if the action could not be read when the event arrived.
	Recovery RecoveryAction `json:"recovery,omitempty"`
	// GPUInstance and ComputeInstance are the IDs of the MIG instances that the event is about. Both
	// are nil if the event is about the whole card (0xFFFFFFFF in NVML).
	GPUInstance     *uint32 `json:"gpuInstance,omitempty"`
	ComputeInstance *uint32 `json:"computeInstance,omitempty"`
	// Place is the placement of the GPU instance when the event arrived. It is needed because NVIDIA's
	// driver reuses the IDs of GPU instances. Place is nil if the placement could not be read.
	Place *EventPlace `json:"place,omitempty"`
	// Count is how many identical events arrived at once. 0 counts as 1.
	Count int       `json:"count,omitempty"`
	At    time.Time `json:"at"`
}

// EventPlace identifies the GPU instance that an event is about, by its profile and placement.
type EventPlace struct {
	ProfileID uint32 `json:"profileID"` // as the hardware reports it, see [Profile.ID]
	Placement `json:"placement"`
	// Part is true if the event is about a compute instance that is smaller than its GPU instance.
	Part bool `json:"part,omitempty"`
}

// RecoveryAction is the recovery action that the GPU's driver recommends
// (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
type RecoveryAction string

const (
	// RecoveryUnknown means that the driver does not report recovery actions, or did not answer.
	// [RecoveryNone] means that the driver recommends nothing.
	RecoveryUnknown       RecoveryAction = ""
	RecoveryNone          RecoveryAction = "none"
	RecoveryReset         RecoveryAction = "gpu-reset"
	RecoveryReboot        RecoveryAction = "node-reboot"
	RecoveryDrainP2P      RecoveryAction = "drain-p2p"
	RecoveryDrainAndReset RecoveryAction = "drain-and-reset"
	RecoveryIMEXDomain    RecoveryAction = "recover-imex-domain"
	RecoveryBusReset      RecoveryAction = "bus-reset"
	RecoverySystemReboot  RecoveryAction = "system-reboot"
	// RecoveryOther is a recovery action that this version of the plugin does not know.
	RecoveryOther RecoveryAction = "other"
)

// Reach says how a GPU answered a query.
type Reach string

const (
	ReachOK Reach = "ok"
	// ReachLost means that NVML reports the GPU lost or no longer lists it, or that it has left the
	// PCI bus.
	ReachLost   Reach = "lost"
	ReachFailed Reach = "failed" // NVML answered with another error
	// ReachNeedsReset means that, according to NVML, the GPU must be reset before use.
	ReachNeedsReset Reach = "needs-reset"
	// ReachNotOurs means that another kernel driver, such as vfio-pci, is bound to the GPU. NVML
	// cannot query such a GPU, and nothing is wrong with it.
	ReachNotOurs Reach = "not-ours"
	ReachWedged  Reach = "wedged" // No answer in time. The rest of the condition means nothing.
)

// Condition is one GPU's answer to a query of its state. A value that the GPU or its driver does
// not report is absent, which does not mean that nothing is wrong. A condition whose Reach is not
// [ReachOK] may still have values from the queries that succeeded.
type Condition struct {
	Card  Card  `json:"card"`
	Reach Reach `json:"reach"`
	// Error explains why Reach is not [ReachOK].
	Error    string         `json:"error,omitempty"`
	Recovery RecoveryAction `json:"recovery,omitempty"`
	// Remap is the state of row remapping (nvmlDeviceGetRemappedRows), or of page retirement on cards
	// before Ampere.
	Remap *Remap `json:"remap,omitempty"`
	// Uncorrected counts uncorrected ECC errors since the last reset or driver load
	// (NVML_VOLATILE_ECC). A reset sets the counter back, and so does an admin with nvidia-smi -p 0.
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	// EnergyMillijoules is the energy used since the driver was loaded
	// (nvmlDeviceGetTotalEnergyConsumption). It only grows, so a smaller number proves a driver
	// reload.
	EnergyMillijoules *uint64 `json:"energyMillijoules,omitempty"`
	// Fabric is nil if the card is in no NVLink fabric, or if the query of the fabric failed.
	Fabric *Fabric `json:"fabric,omitempty"`
	// MIG is the card's MIG mode. It is nil for a card without MIG, or if the query of the mode
	// failed. It says nothing about health, but the inventory scans again when it changes.
	MIG *MIGMode `json:"mig,omitempty"`
	// Took is how long the query took.
	Took time.Duration `json:"took,omitempty"`
	At   time.Time     `json:"at"`
}

// MIGMode says whether a card is in MIG mode, and whether it will be after its next reset.
type MIGMode struct {
	Enabled bool `json:"enabled,omitempty"`
	Pending bool `json:"pending,omitempty"`
}

// Remap says whether the card can replace bad memory rows.
type Remap struct {
	Pending bool `json:"pending,omitempty"` // takes effect with the next reset
	Failed  bool `json:"failed,omitempty"`  // no spare is left
}

// FabricState is the progress of the card's registration with its NVLink fabric
// (nvmlGpuFabricInfo).
type FabricState string

const (
	FabricNotStarted FabricState = "not-started"
	FabricInProgress FabricState = "in-progress"
	FabricCompleted  FabricState = "completed"
	// FabricNotUsed is the state of a card in MIG mode, which does not use its fabric.
	FabricNotUsed FabricState = "not-used"
)

// Fabric is a card's membership in an NVLink fabric.
type Fabric struct {
	State FabricState `json:"state"`
	// Error explains why a completed registration with the fabric failed. It is empty after a success.
	Error string `json:"error,omitempty"`
}

// WatcherState is a report of the watcher process, which queries the GPUs, about itself.
type WatcherState struct {
	// Up is true while the watcher process queries the GPUs. Otherwise the state of the GPUs is
	// unknown.
	Up bool `json:"up"`
	// Events is true while the watcher process also receives NVML events. Otherwise it only queries
	// the GPUs.
	Events bool `json:"events"`
	// Error explains why Up or Events is false.
	Error string `json:"error,omitempty"`
	// ChangedGPU is a GPU that came to NVIDIA's driver, or began to leave it, after the watcher
	// process started NVML. NVML does not know a new GPU, and keeps a leaving one open. So another
	// process must take over.
	ChangedGPU PCIAddress `json:"changedGPU,omitempty"`
	// Released is true after the watcher process closed all GPUs because the plugin asked it to.
	Released bool `json:"released,omitempty"`
	// Driver identifies one load of the kernel driver. If it changes, the driver was loaded again, so
	// every GPU has started again. Driver is empty if the load cannot be determined.
	Driver string    `json:"driver,omitempty"`
	At     time.Time `json:"at"`
}
