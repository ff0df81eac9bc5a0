package device

import "time"

// Signal is one thing that the hardware, or who listens to it, says about health. Exactly one of its fields is set. Signals are facts: what they mean is
// package health's to judge.
type Signal struct {
	Event     *HealthEvent  `json:"event,omitempty"`
	Condition *Condition    `json:"condition,omitempty"`
	Watcher   *WatcherState `json:"watcher,omitempty"`
}

// EventKind is a type of NVML event that says something about health.
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

// HealthEvent is what the hardware announced on its own.
type HealthEvent struct {
	Card Card      `json:"card"`
	Kind EventKind `json:"kind"`
	// XID is the code of an [EventXID].
	XID uint64 `json:"xid,omitempty"`
	// Recovery is the action that an [EventRecoveryAction] announced, [RecoveryUnknown] if it could not be read at once.
	Recovery RecoveryAction `json:"recovery,omitempty"`
	// GPUInstance and ComputeInstance are nil where the event is about the whole card (0xFFFFFFFF of NVML).
	GPUInstance     *uint32 `json:"gpuInstance,omitempty"`
	ComputeInstance *uint32 `json:"computeInstance,omitempty"`
	// Place is where on the card that GPU instance was when the event came: IDs are used again. It is nil where that could not be asked.
	Place *EventPlace `json:"place,omitempty"`
	// Count is how many alike came at once; 0 counts as 1.
	Count int       `json:"count,omitempty"`
	At    time.Time `json:"at"`
}

// EventPlace is the GPU instance that an event was about.
type EventPlace struct {
	ProfileID uint32 `json:"profileID"` // as the hardware reports it, see [Profile.ID]
	Placement `json:"placement"`
	// Part says that the compute instance is less than its GPU instance.
	Part bool `json:"part,omitempty"`
}

// RecoveryAction is what the GPU's driver recommends (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
type RecoveryAction string

const (
	// RecoveryUnknown is the action of a driver that has no such field, or did not answer. It is not the same as none.
	RecoveryUnknown       RecoveryAction = ""
	RecoveryNone          RecoveryAction = "none"
	RecoveryReset         RecoveryAction = "gpu-reset"
	RecoveryReboot        RecoveryAction = "node-reboot"
	RecoveryDrainP2P      RecoveryAction = "drain-p2p"
	RecoveryDrainAndReset RecoveryAction = "drain-and-reset"
	RecoveryIMEXDomain    RecoveryAction = "recover-imex-domain"
	RecoveryBusReset      RecoveryAction = "bus-reset"
	RecoverySystemReboot  RecoveryAction = "system-reboot"
	// RecoveryOther is one that this version does not know.
	RecoveryOther RecoveryAction = "other"
)

// Reach says how a GPU answered when it was asked.
type Reach string

const (
	ReachOK     Reach = "ok"
	ReachLost   Reach = "lost"   // NVML says that it is lost, or does not list it any more, or it has left the PCI bus
	ReachFailed Reach = "failed" // NVML answered with another error
	// ReachNeedsReset is a GPU of which NVML says that it must be reset before it can be used.
	ReachNeedsReset Reach = "needs-reset"
	// ReachNotOurs is a GPU that somebody has given to another kernel driver, such as vfio-pci: nobody here can ask it, and nothing is wrong with it.
	ReachNotOurs Reach = "not-ours"
	ReachWedged  Reach = "wedged" // no answer in time; nothing else in the condition means anything
)

// Condition is what one GPU answered when it was asked for its state. What the GPU or its driver does not know is absent, which is not the same as good.
// One that is not [ReachOK] may still say some of it: what was answered before, or beside, the question that failed.
type Condition struct {
	Card  Card  `json:"card"`
	Reach Reach `json:"reach"`
	// Error says more where Reach is not [ReachOK].
	Error    string         `json:"error,omitempty"`
	Recovery RecoveryAction `json:"recovery,omitempty"`
	// Remap is the state of row remapping (nvmlDeviceGetRemappedRows), or of page retirement on cards before Ampere.
	Remap *Remap `json:"remap,omitempty"`
	// Uncorrected counts uncorrected ECC errors since the last reset or driver load (NVML_VOLATILE_ECC). It is smaller than before after a reset, but
	// also after somebody has cleared it (nvidia-smi -p 0).
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	// EnergyMillijoules is what the GPU has used since its driver was loaded (nvmlDeviceGetTotalEnergyConsumption). It only grows: a smaller number than
	// before proves that the driver began anew.
	EnergyMillijoules *uint64 `json:"energyMillijoules,omitempty"`
	// Fabric is nil for a card that is in no NVLink fabric, or did not say.
	Fabric *Fabric `json:"fabric,omitempty"`
	// MIG is the card's MIG mode, nil for a card that has none, or did not say. It says nothing about health: the inventory wants to know of a change.
	MIG *MIGMode `json:"mig,omitempty"`
	// Took is how long the answer took.
	Took time.Duration `json:"took,omitempty"`
	At   time.Time     `json:"at"`
}

// MIGMode is whether a card is in MIG mode, and whether it will be after its next reset.
type MIGMode struct {
	Enabled bool `json:"enabled,omitempty"`
	Pending bool `json:"pending,omitempty"`
}

// Remap says what becomes of bad memory.
type Remap struct {
	Pending bool `json:"pending,omitempty"` // takes effect with the next reset
	Failed  bool `json:"failed,omitempty"`  // no spare is left
}

// FabricState is how far the card's registration with its NVLink fabric is (nvmlGpuFabricInfo).
type FabricState string

const (
	FabricNotStarted FabricState = "not-started"
	FabricInProgress FabricState = "in-progress"
	FabricCompleted  FabricState = "completed"
	// FabricNotUsed is that of a card in MIG mode, which leaves its fabric and needs none.
	FabricNotUsed FabricState = "not-used"
)

// Fabric is a card's membership in an NVLink fabric.
type Fabric struct {
	State FabricState `json:"state"`
	// Error is why a completed registration failed, empty if it did not.
	Error string `json:"error,omitempty"`
}

// WatcherState says how well the hardware is listened to.
type WatcherState struct {
	// Up says that GPUs are being asked. While it is false nothing is known.
	Up bool `json:"up"`
	// Events says that events are listened to as well. While it is false, only what conditions show is seen.
	Events bool `json:"events"`
	// Error is why not.
	Error string `json:"error,omitempty"`
	// Released says that the listener let go of the hardware because it was told to.
	Released bool `json:"released,omitempty"`
	// Driver is equal as long as the same load of the kernel driver runs; empty if that cannot be told. With another one every GPU has begun anew.
	Driver string    `json:"driver,omitempty"`
	At     time.Time `json:"at"`
}
