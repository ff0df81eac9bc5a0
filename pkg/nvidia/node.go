package nvidia

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Node is what one pass found. It is plain data: it can be compared, printed, kept and sent between processes.
type Node struct {
	Driver device.Driver `json:"driver"`
	// GPUs are the ones that can be offered, by PCI address.
	GPUs []GPU `json:"gpus"`
	// Common is what every container with a GPU needs, whichever GPU it is: control nodes, libraries, tools, hooks. Paths are the host's.
	Common specs.ContainerEdits `json:"common"`
	// Problems says for each GPU that is left out, or not offered in every shape, why, by PCI address.
	Problems []Problem `json:"problems,omitempty"`
}

// GPU is a card with what a container needs to use it besides [Node.Common]. Paths are the host's.
type GPU struct {
	device.GPU
	Edits specs.ContainerEdits `json:"edits"`
}

// Problem says why a GPU is not offered, or not in every shape, and what helps. PCIAddress is empty where even the address could not be read.
type Problem struct {
	PCIAddress device.PCIAddress `json:"pciAddress,omitempty"`
	Message    string            `json:"message"`
	// Uncertain is the UUID of a card that is well but for its MIG instances, which could not be read. Whoever knows the card from before knows it still.
	Uncertain string `json:"uncertain,omitempty"`
}

// problemOf says what is wrong with a card.
func problemOf(a device.PCIAddress, err error) Problem {
	p := Problem{PCIAddress: a, Message: err.Error()}
	var uncertain *uncertainError
	if errors.As(err, &uncertain) && !errors.Is(err, nvmlError(nvml.ERROR_GPU_IS_LOST)) {
		p.Uncertain = uncertain.uuid
	}
	return p
}

// uncertainError is that a card's MIG instances could not be read.
type uncertainError struct {
	uuid string
	err  error
}

func (e *uncertainError) Unwrap() error { return e.err }

func (e *uncertainError) Error() string {
	return fmt.Sprintf("MIG mode is on, and how the GPU is cut cannot be read: %v", e.err)
}

func (p Problem) String() string {
	if p.PCIAddress == "" {
		return p.Message
	}
	return string(p.PCIAddress) + ": " + p.Message
}

// NotReadyError says that the node cannot serve GPUs now. It may later, without a restart of the plugin.
type NotReadyError struct {
	Reason string `json:"reason"`
	// Remedy is what an operator can do about it.
	Remedy string `json:"remedy,omitempty"`
}

func (e *NotReadyError) Error() string {
	if e.Remedy == "" {
		return e.Reason
	}
	return e.Reason + ": " + e.Remedy
}

func notReady(remedy, reason string, args ...any) error {
	return &NotReadyError{Reason: fmt.Sprintf(reason, args...), Remedy: remedy}
}
