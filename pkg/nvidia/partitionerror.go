package nvidia

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// These types are defined in package device, so that other packages can use them without importing
// this package and its C library.
type (
	// Card identifies a GPU by PCI address and UUID.
	Card = device.Card
	// State is the current partitioning of a GPU.
	State = device.CardState
	// FailureCode is the reason why a MIG operation failed.
	FailureCode = device.FailureCode
)

// These are the codes of a [PartitionError]. Package device documents them.
const (
	CodeInUse        = device.FailureInUse
	CodeInsufficient = device.FailureInsufficient
	CodeNotFound     = device.FailureNotFound
	CodeNotSupported = device.FailureNotSupported
	CodeNoPermission = device.FailureNoPermission
	CodeReset        = device.FailureReset
	CodeNoDriver     = device.FailureNoDriver
	CodeLost         = device.FailureLost
	CodeReplaced     = device.FailureReplaced
	CodeChanged      = device.FailureChanged
	CodeDied         = device.FailureDied
	CodeTimeout      = device.FailureTimeout
	CodeOther        = device.FailureOther
)

// Process is a process that has a GPU open, as NVML or /proc shows.
type Process struct {
	PID  uint32 `json:"pid"`
	Name string `json:"name,omitempty"`
	// Pod is the UID of the process's Pod. It is empty if the process belongs to no Pod.
	Pod string `json:"pod,omitempty"`
}

func (p Process) String() string {
	text := fmt.Sprintf("process %d", p.PID)
	if p.Pod != "" {
		text += ", Pod " + p.Pod
	}
	if p.Name == "" {
		return text
	}
	return p.Name + " (" + text + ")"
}

// PartitionError says why a MIG operation failed, on which GPU, and what to do. If the call ended
// with its context, it wraps the context's error.
type PartitionError struct {
	// Op names the operation and the GPU, such as "create a GPU instance of profile 19 at 0:1 on
	// gpu-0000-1b-00-0".
	Op      string      `json:"op"`
	Code    FailureCode `json:"code"`
	Message string      `json:"message"`
	// Processes are the processes that have the GPU or MIG instance open. They are set if the
	// operation failed because of them.
	Processes []Process `json:"processes,omitempty"`

	cause error
	// transient says that a retry is likely to succeed.
	transient bool
	// inUse says that the operation failed because the card is in use, so Processes should be filled
	// with the processes that have the card open.
	inUse bool
}

// namedProcesses is how many processes an error message names at most.
const namedProcesses = 8

func (e *PartitionError) Unwrap() error { return e.cause }

// FailureCode returns e.Code. Packages that do not import this one find the code through this
// method.
func (e *PartitionError) FailureCode() FailureCode { return e.Code }

func (e *PartitionError) Error() string {
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
