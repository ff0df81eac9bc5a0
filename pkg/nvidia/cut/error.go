package cut

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// Error says why a MIG operation failed, on which GPU, and what to do. If the call ended
// with its context, it wraps the context's error.
type Error struct {
	// Op names the operation and the GPU, such as "create a GPU instance of profile 19 at 0:1 on
	// gpu-0000-1b-00-0".
	Op      string             `json:"op"`
	Code    device.FailureCode `json:"code"`
	Message string             `json:"message"`
	// Processes are the processes that have the GPU or MIG instance open. They are set if the
	// operation failed because of them.
	Processes []nvidia.Process `json:"processes,omitempty"`

	cause error
	// transient says that a retry is likely to succeed.
	transient bool
}

// namedProcesses is how many processes an error message names at most.
const namedProcesses = 8

func (e *Error) Unwrap() error { return e.cause }

// FailureCode returns e.Code. Packages that do not import this one find the code through this
// method.
func (e *Error) FailureCode() device.FailureCode { return e.Code }

func (e *Error) Error() string {
	text := e.Op + ": " + e.Message
	if len(e.Processes) == 0 {
		return text
	}
	var names []string
	for i, p := range e.Processes {
		if i == namedProcesses {
			names = append(names, fmt.Sprintf("%d more", len(e.Processes)-i))
			break
		}
		names = append(names, p.String())
	}
	return text + "; it is open in " + strings.Join(names, ", ")
}
