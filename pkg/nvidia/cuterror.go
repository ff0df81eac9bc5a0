package nvidia

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// The words for cuts are package device's, so that whoever asks for them need not know NVML.
type (
	// Card says which GPU is meant.
	Card = device.Card
	// State is how a GPU is cut.
	State = device.CutState
	// CutCode says why a cut failed.
	CutCode = device.CutCode
)

// Codes of a [CutError]; package device says what each means.
const (
	CodeInUse        = device.CutInUse
	CodeInsufficient = device.CutInsufficient
	CodeNotFound     = device.CutNotFound
	CodeNotSupported = device.CutNotSupported
	CodeNoPermission = device.CutNoPermission
	CodeReset        = device.CutReset
	CodeNoDriver     = device.CutNoDriver
	CodeLost         = device.CutLost
	CodeReplaced     = device.CutReplaced
	CodeChanged      = device.CutChanged
	CodeDied         = device.CutDied
	CodeTimeout      = device.CutTimeout
	CodeOther        = device.CutOther
)

// Process has a GPU open, as NVML or /proc shows.
type Process struct {
	PID  uint32 `json:"pid"`
	Name string `json:"name,omitempty"`
	// Pod is the UID of its Pod, empty if it has none.
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

// CutError is why a cut failed: on which GPU, what was tried, and the way out. It wraps the context's error where that ended the call.
type CutError struct {
	// Op is what was tried on which GPU, as in "create a GPU instance of profile 19 at 0:1 on gpu-0000-1b-00-0".
	Op      string  `json:"op"`
	Code    CutCode `json:"code"`
	Message string  `json:"message"`
	// Processes have the GPU or the instance open, where it is in use.
	Processes []Process `json:"processes,omitempty"`

	cause error
	// passing says that the next try may well succeed.
	passing bool
	// held says that whoever has the card open is to be named.
	held bool
}

// namedProcesses is how many processes the text names.
const namedProcesses = 8

func (e *CutError) Unwrap() error { return e.cause }

// CutCode is the code, for callers that know the error by what it can say.
func (e *CutError) CutCode() CutCode { return e.Code }

func (e *CutError) Error() string {
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
