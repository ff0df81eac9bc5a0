package state

import "math"

// The magic number and the version of the state file's format. lib/state.h has the same values.
const (
	Magic  uint64 = 0x314d49534c4d564e
	Layout uint32 = 8

	lockWrite        = 0
	lockInUse        = 1
	lockCapabilities = 2
	lockCut          = 1024
	lockOpen         = 8192
	lockCompute      = 16384
	computeBytes     = 256
	lockSubscribe    = 2097152

	gpuInstances     = 15
	computeInstances = 8
	maxProcesses     = 16

	maxProfiles   = 24
	maxCIProfiles = 40
	maxPlacements = 16

	// The driver drops no event: it queues them in memory for each open file (nv_post_event in
	// kernel-open/nvidia/nv.c of the open GPU kernel modules). So the ring outlasts slow readers.
	eventCapacity = 65536
	faultCapacity = 64

	// Absent replaces a number that the model file does not give.
	Absent uint32 = math.MaxUint32
)

// Header mirrors struct nvmlsim_header of lib/state.h. Each c tag names the field in the C struct.
type Header struct {
	Magic         uint64   `c:"magic"`
	Layout        uint32   `c:"layout"`
	HeaderSize    uint32   `c:"header_size"`
	ModelSize     uint32   `c:"model_size"`
	GPUSize       uint32   `c:"gpu_size"`
	EventSize     uint32   `c:"event_size"`
	FaultSize     uint32   `c:"fault_size"`
	ModelCount    uint32   `c:"model_count"`
	GPUCount      uint32   `c:"gpu_count"`
	EventCount    uint32   `c:"event_count"`
	FaultCount    uint32   `c:"fault_count"`
	ModelOffset   uint64   `c:"model_offset"`
	GPUOffset     uint64   `c:"gpu_offset"`
	EventOffset   uint64   `c:"event_offset"`
	FaultOffset   uint64   `c:"fault_offset"`
	TotalSize     uint64   `c:"total_size"`
	Generation    uint64   `c:"generation"`
	EventSeq      uint64   `c:"event_seq"`
	EventWake     uint32   `c:"event_wake"`
	DriverLoaded  uint32   `c:"driver_loaded"`
	DriverEpoch   uint32   `c:"driver_epoch"`
	CUDAVersion   uint32   `c:"cuda_version"`
	DriverVersion [32]byte `c:"driver_version"`
	NodeName      [64]byte `c:"node_name"`
	Seed          [64]byte `c:"seed"`

	Root           [256]byte `c:"root"`
	Devices        [256]byte `c:"devices"`
	CapsMajor      uint32    `c:"caps_major"`
	PlainDevices   uint32    `c:"plain_devices"`
	CutLock        uint32    `c:"cut_lock"`
	Reserved       uint32    `c:"reserved"`
	FabricSettleMS uint64    `c:"fabric_settle_ms"`

	ClientBlocksMode    uint32 `c:"client_blocks_mode"`
	ClientBlocksDestroy uint32 `c:"client_blocks_destroy"`
	CreateInUse         uint32 `c:"create_in_use"`
	NoCapabilityNodes   uint32 `c:"no_capability_nodes"`
	SettingsStay        uint32 `c:"settings_stay"`
	ConfCompute         uint32 `c:"conf_compute"`
	TopologyStays       uint32 `c:"topology_stays"`
	UUIDBySyspipe       uint32 `c:"uuid_by_syspipe"`
	FabricByInstances   uint32 `c:"fabric_by_instances"`
	EarlyWait           uint32 `c:"early_wait"`
	LostAnswer          uint32 `c:"lost_answer"`
	GSPTimeoutMS        uint32 `c:"gsp_timeout_ms"`
	AttachCostMS        uint64 `c:"attach_cost_ms"`
	VFIOLoaded          uint32 `c:"vfio_loaded"`
	NoRemapFields       uint32 `c:"no_remap_fields"`
}

// Profile mirrors struct nvmlsim_profile of lib/state.h.
type Profile struct {
	NVMLProfile     uint32                `c:"nvml_profile"`
	ID              uint32                `c:"id"`
	Slices          uint32                `c:"slices"`
	InstancesMax    uint32                `c:"instances_max"`
	P2P             uint32                `c:"p2p"`
	SM              uint32                `c:"sm"`
	CopyEngines     uint32                `c:"copy_engines"`
	Decoders        uint32                `c:"decoders"`
	Encoders        uint32                `c:"encoders"`
	JPEGEngines     uint32                `c:"jpeg_engines"`
	OFAEngines      uint32                `c:"ofa_engines"`
	PlacementSize   uint32                `c:"placement_size"`
	PlacementCount  uint32                `c:"placement_count"`
	PlacementStarts [maxPlacements]uint32 `c:"placement_starts"`
	WholeCI         uint32                `c:"whole_ci"`
	MemoryMiB       uint64                `c:"memory_mib"`
	Name            [32]byte              `c:"name"`
}

// CIProfile mirrors struct nvmlsim_ci_profile of lib/state.h.
type CIProfile struct {
	GISlices        uint32    `c:"gi_slices"`
	ID              uint32    `c:"id"`
	Slices          uint32    `c:"slices"`
	InstancesMax    uint32    `c:"instances_max"`
	SM              uint32    `c:"sm"`
	PlacementCount  uint32    `c:"placement_count"`
	PlacementStarts [8]uint32 `c:"placement_starts"`
}

// Model mirrors struct nvmlsim_model of lib/state.h.
type Model struct {
	Key             [64]byte                 `c:"key"`
	Name            [96]byte                 `c:"name"`
	Brand           uint32                   `c:"brand"`
	Architecture    uint32                   `c:"architecture"`
	CCMajor         uint32                   `c:"cc_major"`
	CCMinor         uint32                   `c:"cc_minor"`
	PCIDeviceID     uint32                   `c:"pci_device_id"`
	PCISubsystemID  uint32                   `c:"pci_subsystem_id"`
	Multiprocessors uint32                   `c:"multiprocessors"`
	ECC             uint32                   `c:"ecc"`
	PowerLimitMW    uint32                   `c:"power_limit_mw"`
	PowerIdleMW     uint32                   `c:"power_idle_mw"`
	AddressingMode  uint32                   `c:"addressing_mode"`
	MIGSupported    uint32                   `c:"mig_supported"`
	MIGMaxInstances uint32                   `c:"mig_max_instances"`
	ProfileCount    uint32                   `c:"profile_count"`
	CIProfileCount  uint32                   `c:"ci_profile_count"`
	BAR1MiB         uint32                   `c:"bar1_mib"`
	MIGNeedsReset   uint32                   `c:"mig_needs_reset"`
	MemorySlices    uint32                   `c:"memory_slices"`
	TimeSlices      uint32                   `c:"time_slices"`
	EventTypes      uint32                   `c:"event_types"`
	MemoryMiB       uint64                   `c:"memory_mib"`
	Profiles        [maxProfiles]Profile     `c:"profiles"`
	CIProfiles      [maxCIProfiles]CIProfile `c:"ci_profiles"`
}

// GPU mirrors struct nvmlsim_gpu of lib/state.h.
type GPU struct {
	Model              uint32                                 `c:"model"`
	Minor              uint32                                 `c:"minor"`
	PCIDomain          uint32                                 `c:"pci_domain"`
	PCIBus             uint32                                 `c:"pci_bus"`
	PCIDevice          uint32                                 `c:"pci_device"`
	NUMANode           int32                                  `c:"numa_node"`
	PCIRoot            uint32                                 `c:"pci_root"`
	PCISwitch          uint32                                 `c:"pci_switch"`
	ModuleID           uint32                                 `c:"module_id"`
	Present            uint32                                 `c:"present"`
	Lost               uint32                                 `c:"lost"`
	PersistenceMode    uint32                                 `c:"persistence_mode"`
	ComputeMode        uint32                                 `c:"compute_mode"`
	MIGCurrent         uint32                                 `c:"mig_current"`
	MIGPending         uint32                                 `c:"mig_pending"`
	RecoveryAction     uint32                                 `c:"recovery_action"`
	RemapPending       uint32                                 `c:"remap_pending"`
	RemapFailure       uint32                                 `c:"remap_failure"`
	ECCSingleVolatile  uint64                                 `c:"ecc_single_volatile"`
	ECCDoubleVolatile  uint64                                 `c:"ecc_double_volatile"`
	ECCSingleAggregate uint64                                 `c:"ecc_single_aggregate"`
	ECCDoubleAggregate uint64                                 `c:"ecc_double_aggregate"`
	FabricState        uint32                                 `c:"fabric_state"`
	FabricClique       uint32                                 `c:"fabric_clique"`
	FabricCluster      [16]byte                               `c:"fabric_cluster"`
	FabricUntilMS      uint64                                 `c:"fabric_until_ms"`
	FabricInterim      uint32                                 `c:"fabric_interim"`
	Virtualization     uint32                                 `c:"virtualization"`
	TimeSlice          uint32                                 `c:"time_slice"`
	Epoch              uint32                                 `c:"epoch"`
	EventTypes         uint64                                 `c:"event_types"`
	EnergySinceMS      uint64                                 `c:"energy_since_ms"`
	FabricStatus       uint32                                 `c:"fabric_status"`
	CreateRefused      uint32                                 `c:"create_refused"`
	Processes          [maxProcesses]uint64                   `c:"processes"`
	Instances          [gpuInstances]uint64                   `c:"instances"`
	ComputeInstances   [gpuInstances][computeInstances]uint64 `c:"compute_instances"`
	UUID               [48]byte                               `c:"uuid"`
	Serial             [32]byte                               `c:"serial"`
	NoMemoryInfo       uint64                                 `c:"no_memory_info"`
	Binding            uint64                                 `c:"binding"`
}

// Event mirrors struct nvmlsim_event of lib/state.h.
type Event struct {
	Seq             uint64 `c:"seq"`
	Type            uint64 `c:"type"`
	Data            uint64 `c:"data"`
	GPU             uint32 `c:"gpu"`
	GPUInstance     uint32 `c:"gpu_instance"`
	ComputeInstance uint32 `c:"compute_instance"`
	Reserved        uint32 `c:"reserved"`
}

// Kinds of injected faults: a call waits, fails, kills its process, or does nothing.
const (
	FaultSlow uint32 = 1
	FaultFail uint32 = 2
	FaultKill uint32 = 3
	// FaultIgnore lets a write to sysfs succeed without effect.
	FaultIgnore uint32 = 4
)

// Fault mirrors struct nvmlsim_fault of lib/state.h.
type Fault struct {
	Serial    uint64   `c:"serial"`
	DelayMS   uint64   `c:"delay_ms"`
	Hits      uint64   `c:"hits"`
	Kind      uint32   `c:"kind"`
	Error     uint32   `c:"error"`
	GPU       int32    `c:"gpu"`
	Remaining int32    `c:"remaining"`
	After     uint32   `c:"after"`
	Group     uint32   `c:"group"`
	Function  [64]byte `c:"function"`
}
