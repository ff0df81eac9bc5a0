package nvidia

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Error says why a call to a GPU failed, and what to do. Child processes send it as JSON.
type Error struct {
	// Op names the operation and the GPU, such as "create a GPU instance of profile 19 at 0:1 on
	// gpu-0000-1b-00-0".
	Op      string             `json:"op"`
	Code    device.FailureCode `json:"code"`
	Message string             `json:"message"`
	// Processes are the processes that have the GPU or MIG instance open. They are set if the
	// operation failed because of them.
	Processes []Process `json:"processes,omitempty"`
	// Transient says that a retry is likely to succeed.
	Transient bool `json:"transient,omitempty"`

	// Cause is the error of the context with which the call ended, if it did.
	Cause error `json:"-"`
}

// namedProcesses is how many processes an error message names at most.
const namedProcesses = 8

func (e *Error) Unwrap() error { return e.Cause }

// FailureCode returns e.Code, for packages that do not import this one.
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
