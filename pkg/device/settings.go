package device

// ComputeMode says how many processes may use a GPU at once.
type ComputeMode string

const (
	// ComputeDefault lets any number of processes use the GPU, in turn.
	ComputeDefault ComputeMode = "default"
	// ComputeExclusiveProcess lets one process at a time use it: the server of MPS, through which others do. It does not exist in MIG mode.
	ComputeExclusiveProcess ComputeMode = "exclusive-process"
	// ComputeProhibited lets none.
	ComputeProhibited ComputeMode = "prohibited"
)

// TimeSlice says how long a process computes before the next has its turn. The values are those that the driver is told.
type TimeSlice int

const (
	TimeSliceDefault TimeSlice = iota
	TimeSliceShort
	TimeSliceMedium
	TimeSliceLong
)
