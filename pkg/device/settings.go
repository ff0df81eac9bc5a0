package device

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
