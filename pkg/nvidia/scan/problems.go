package scan

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// problemOf returns the Problem of a card whose reading failed with err.
func problemOf(a device.PCIAddress, err error) nvidia.Problem {
	p := nvidia.Problem{PCIAddress: a, Message: err.Error()}
	var uncertain *uncertainError
	if errors.As(err, &uncertain) && !errors.Is(err, nvmlx.Error(nvml.ERROR_GPU_IS_LOST)) {
		p.Uncertain = uncertain.uuid
	}
	return p
}

// uncertainError says that the MIG instances of a card with MIG on could not be read.
type uncertainError struct {
	uuid string
	err  error
}

func (e *uncertainError) Unwrap() error { return e.err }

func (e *uncertainError) Error() string {
	return fmt.Sprintf("MIG mode is on, and the GPU's MIG instances cannot be read: %v", e.err)
}

// distinct drops a card that has the same PCI address as the card before, and adds a problem for
// it. Otherwise two devices would have one name, and the scheduler would ignore the whole pool.
func distinct(gpus []nvidia.GPU, problems []nvidia.Problem) ([]nvidia.GPU, []nvidia.Problem) {
	var kept []nvidia.GPU
	for i, g := range gpus {
		if i > 0 && gpus[i-1].PCIAddress == g.PCIAddress {
			message := fmt.Sprintf("NVML lists two GPUs at this address (%s and %s): only the first is offered", gpus[i-1].UUID, g.UUID)
			problems = append(problems, nvidia.Problem{PCIAddress: g.PCIAddress, Message: message})
			continue
		}
		kept = append(kept, g)
	}
	return kept, problems
}

// explain adds a problem for each card on the PCI bus that NVML does not list. If a problem has no
// address and only one such card is left, explain sets that card's address instead. If this is
// ambiguous, explain leaves those cards out.
func explain(sysfs string, listed map[device.PCIAddress]bool, problems []nvidia.Problem) []nvidia.Problem {
	onBus, _ := host.GPUs(sysfs) // without sysfs, the problems stay as they are
	var nameless []int
	for i, p := range problems {
		if p.PCIAddress == "" {
			nameless = append(nameless, i)
		}
	}
	var unlisted []device.PCIAddress
	for _, a := range onBus {
		if listed[a] {
			continue
		}
		if driver := host.Driver(sysfs, a); driver != "" && driver != "nvidia" {
			problems = append(problems, nvidia.Problem{PCIAddress: a, Message: fmt.Sprintf("bound to the kernel driver %s, not to nvidia", driver)})
			continue
		}
		unlisted = append(unlisted, a)
	}
	if len(nameless) == 1 && len(unlisted) == 1 {
		problems[nameless[0]].PCIAddress = unlisted[0]
		return problems
	}
	if len(nameless) > 0 {
		return problems // it is unknown which address belongs to which problem
	}
	for _, a := range unlisted {
		problems = append(problems, nvidia.Problem{
			PCIAddress: a,
			Message:    "on the PCI bus, but NVML does not list it: check dmesg for NVRM messages about this address",
		})
	}
	return problems
}
