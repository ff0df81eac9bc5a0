package nvidia

import (
	"fmt"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Card names the GPU that a cut is about. It is found by its place; another UUID there is another card, which is not touched.
type Card struct {
	PCIAddress device.PCIAddress `json:"pciAddress"`
	UUID       string            `json:"uuid"`
}

func (c Card) String() string { return c.PCIAddress.WholeName() + " (" + c.UUID + ")" }

// State is how a card is cut at the moment when it was asked.
type State struct {
	// Minor is N of /dev/nvidiaN: it is read again, because a change of the MIG mode may change it.
	Minor int `json:"minor"`
	// MIG has Enabled, Pending and Instances; what the model could be cut into is the inventory's to know.
	MIG device.MIG `json:"mig"`
}

// CutCode says why the hardware did not do what it was asked.
type CutCode string

const (
	CodeInUse        CutCode = "in-use"         // something has the GPU or the instance open
	CodeInsufficient CutCode = "insufficient"   // the place is taken
	CodeNotFound     CutCode = "not-found"      // the GPU, the profile or the instance is not there
	CodeNotSupported CutCode = "not-supported"  // this GPU, driver or guest cannot be cut, or not so
	CodeNoPermission CutCode = "no-permission"  // the plugin lacks a right
	CodeReset        CutCode = "reset-required" // the MIG mode changes with the next reset of the GPU only; nothing was changed
	CodeNoDriver     CutCode = "no-driver"      // the kernel driver is not loaded: then there are no instances either
	CodeLost         CutCode = "lost"           // the GPU does not answer any more
	CodeReplaced     CutCode = "replaced"       // another card is at the place
	CodeChanged      CutCode = "changed"        // the instance is there and is not the one that was meant
	CodeDied         CutCode = "died"           // the worker ended within the call: whether the call had its effect is unknown
	CodeTimeout      CutCode = "timeout"        // the call outlived its context: whether it had its effect is unknown
	CodeOther        CutCode = "other"
)

// Process is one that has a GPU open, as NVML lists it.
type Process struct {
	PID  uint32 `json:"pid"`
	Name string `json:"name,omitempty"`
}

func (p Process) String() string {
	if p.Name == "" {
		return fmt.Sprintf("process %d", p.PID)
	}
	return fmt.Sprintf("%s (process %d)", p.Name, p.PID)
}

// CutError is why a cut failed: on which GPU, what was tried, and the way out. It wraps the context's error where that ended the call.
type CutError struct {
	// Op is what was tried on which GPU, as in "create a GPU instance of profile 19 at 0:1 on gpu-0000-1b-00-0".
	Op      string  `json:"op"`
	Code    CutCode `json:"code"`
	Message string  `json:"message"`
	// Processes are those that NVML lists on the GPU, where it is in use.
	Processes []Process `json:"processes,omitempty"`

	cause error
}

// namedProcesses is how many processes the text names.
const namedProcesses = 8

func (e *CutError) Unwrap() error { return e.cause }

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
