package nvidia

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// computeModes are NVML's. The second way of being exclusive went with CUDA 8; a driver that still says so means a single process all the same.
var computeModes = map[nvml.ComputeMode]device.ComputeMode{
	nvml.COMPUTEMODE_DEFAULT: device.ComputeDefault, nvml.COMPUTEMODE_EXCLUSIVE_THREAD: device.ComputeExclusiveProcess,
	nvml.COMPUTEMODE_PROHIBITED: device.ComputeProhibited, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: device.ComputeExclusiveProcess,
}

var computeModeNumbers = map[device.ComputeMode]nvml.ComputeMode{
	device.ComputeDefault: nvml.COMPUTEMODE_DEFAULT, device.ComputeProhibited: nvml.COMPUTEMODE_PROHIBITED,
	device.ComputeExclusiveProcess: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// computeMode is empty where the driver does not say.
func computeMode(card nvml.Device) device.ComputeMode {
	mode, ret := card.GetComputeMode()
	if ret != nvml.SUCCESS {
		return ""
	}
	return computeModes[mode]
}

// persistence is nil where the driver does not say.
func persistence(card nvml.Device) *bool {
	mode, ret := card.GetPersistenceMode()
	if ret != nvml.SUCCESS {
		return nil
	}
	on := mode == nvml.FEATURE_ENABLED
	return &on
}

// setComputeMode goes by the mode that is in force afterwards, whatever NVML answers.
func (c cutter) setComputeMode(r request) (*State, error) {
	number, ok := computeModeNumbers[r.ComputeMode]
	if !ok {
		return nil, r.fail(CodeOther, "this version knows no compute mode %q", r.ComputeMode)
	}
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	before, err := c.state(card)
	if err != nil || before.ComputeMode == r.ComputeMode {
		return before, err
	}
	if before.MIG.Enabled && r.ComputeMode == device.ComputeExclusiveProcess {
		return nil, r.fail(CodeNotSupported, "the GPU is in MIG mode, which has no such compute mode")
	}
	answered := card.SetComputeMode(number)
	now, err := c.state(card)
	if err != nil || now.ComputeMode == r.ComputeMode {
		return now, err
	}
	if answered != nvml.SUCCESS {
		return nil, toError(answered)
	}
	return nil, fmt.Errorf("NVML says that it has set it, and that it is %q", now.ComputeMode)
}
