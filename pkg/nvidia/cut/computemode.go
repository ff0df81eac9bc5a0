package cut

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// computeModes maps NVML's compute modes to those of package device. CUDA 8 removed
// EXCLUSIVE_THREAD. An old driver that still reports it also allows one process only.
var computeModes = map[nvml.ComputeMode]device.ComputeMode{
	nvml.COMPUTEMODE_DEFAULT: device.ComputeDefault, nvml.COMPUTEMODE_EXCLUSIVE_THREAD: device.ComputeExclusiveProcess,
	nvml.COMPUTEMODE_PROHIBITED: device.ComputeProhibited, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: device.ComputeExclusiveProcess,
}

var computeModeNumbers = map[device.ComputeMode]nvml.ComputeMode{
	device.ComputeDefault: nvml.COMPUTEMODE_DEFAULT, device.ComputeProhibited: nvml.COMPUTEMODE_PROHIBITED,
	device.ComputeExclusiveProcess: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// computeMode returns the card's compute mode, empty if the driver does not report it.
func computeMode(card nvml.Device) device.ComputeMode {
	mode, ret := card.GetComputeMode()
	if ret != nvml.SUCCESS {
		return ""
	}
	return computeModes[mode]
}

// setComputeMode sets the card's compute mode and reads it back. If the card then has the requested
// mode, setComputeMode succeeds, even if NVML returned an error for the change.
func (c partitioner) setComputeMode(r request) (device.CardState, error) {
	number, ok := computeModeNumbers[r.ComputeMode]
	if !ok {
		return device.CardState{}, r.fail(device.FailureOther, "this version does not know compute mode %q", r.ComputeMode)
	}
	card, err := c.open(r)
	if err != nil {
		return device.CardState{}, err
	}
	before, err := c.state(card)
	if err != nil || before.ComputeMode == r.ComputeMode {
		return before, err
	}
	if before.MIG.Enabled && r.ComputeMode == device.ComputeExclusiveProcess {
		return device.CardState{}, r.fail(device.FailureNotSupported, "the GPU is in MIG mode, which has no such compute mode")
	}
	answered := card.SetComputeMode(number)
	now, err := c.state(card)
	if err != nil || now.ComputeMode == r.ComputeMode {
		return now, err
	}
	if answered != nvml.SUCCESS {
		return device.CardState{}, nvmlx.ToError(answered)
	}
	return device.CardState{}, fmt.Errorf("NVML reported success, but the mode is %q", now.ComputeMode)
}
