package nvidia

import (
	"fmt"
)

// HangingError says that a process hangs in the driver and keeps NVML open until it ends.
type HangingError struct {
	PID int
	// Gone is closed when the process has ended.
	Gone <-chan struct{}
	Err  error
}

func (e *HangingError) Error() string {
	return fmt.Sprintf("%v; process %d hangs in the NVIDIA driver: check dmesg, and reset the GPU or reboot the node", e.Err, e.PID)
}

func (e *HangingError) Unwrap() error { return e.Err }
