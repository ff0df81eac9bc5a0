package cut

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
)

// setMode changes the MIG mode of a card and reads it back. If the card then has the requested
// mode, it succeeds, even if NVML returned an error. Otherwise it undoes a pending change and
// returns an error. If the card has the mode already, or if r.Watched is set, it changes nothing.
func (c partitioner) setMode(r request) (device.CardState, error) {
	card, err := c.open(r)
	if err != nil {
		return device.CardState{}, err
	}
	before, err := c.modeOf(r, card)
	if err != nil {
		return device.CardState{}, err
	}
	if before.Enabled == r.On || r.Watched {
		return c.state(card)
	}
	activation, ret := card.SetMigMode(modeNumber(r.On))
	// The mode change may have reset the card, so the old handle and the values read before it are
	// invalid.
	if card, err = c.open(r); err != nil {
		return device.CardState{}, err
	}
	now, err := c.modeOf(r, card)
	if err != nil {
		return device.CardState{}, err
	}
	if now.Enabled == r.On {
		return c.state(card)
	}
	if ret == nvml.SUCCESS {
		ret = activation
	}
	// Undo a pending mode change. Otherwise the next reset of the GPU by any tool would silently
	// change the mode. This comes first, because a look at all processes may hang.
	undone := nvml.SUCCESS
	if now.Pending != before.Pending {
		_, undone = card.SetMigMode(modeNumber(before.Pending))
	}
	refusal := c.modeRefusal(r, card, ret)
	if undone != nvml.SUCCESS {
		refusal.Message += fmt.Sprintf("; failed to undo: the mode changes at the GPU's next reset (%v)", nvmlx.ToError(undone))
	}
	return device.CardState{}, refusal
}

func modeNumber(on bool) int {
	if on {
		return nvml.DEVICE_MIG_ENABLE
	}
	return nvml.DEVICE_MIG_DISABLE
}

// modeRefusal returns the error for a mode change after which the MIG mode is still the old one.
// ret is NVML's answer to the change.
func (c partitioner) modeRefusal(r request, card nvml.Device, ret nvml.Return) *nvidia.Error {
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED:
		return r.fail(device.FailureReset, "this machine changes the mode with a reset of the GPU only: "+
			"set it while nothing runs (nvidia-smi -mig), "+
			"let the plugin release the GPUs "+
			"(annotate the Node with gpu.nvidia.com/release-driver=true) and reset (nvidia-smi --gpu-reset), or reboot")
	case nvml.ERROR_IN_USE:
		if there := c.countInstances(card); there > 0 {
			return r.fail(device.FailureInUse, "it has %d GPU instances, which have to be destroyed first (nvidia-smi mig -lgi lists them)", there)
		}
		refusal := c.refusal(r, card, nil, nvmlx.ToError(ret))
		// The plugin's own processes, a scan for example, close the GPU soon.
		refusal.Transient = !slices.ContainsFunc(refusal.Processes, func(p nvidia.Process) bool { return !p.Plugin })
		return refusal
	default:
		return c.explain(r, nvmlx.ToError(ret))
	}
}

// countInstances counts the GPU instances of a card. It leaves out those that NVML fails to list.
func (c partitioner) countInstances(card nvml.Device) int {
	n := 0
	kinds, _ := c.Kinds(card)
	for _, k := range kinds {
		if handles, ret := card.GetGpuInstances(&k.GpuInstanceProfileInfo); ret == nvml.SUCCESS {
			n += len(handles)
		}
	}
	return n
}

// fabric says what the NVLink fabric is still doing to register the card. The result is empty if
// the card is registered or has no fabric.
func (c partitioner) fabric(r request) (string, error) {
	card, err := c.open(r)
	if err != nil {
		return "", err
	}
	state, status, ret := nvmlx.FabricInfo(c.Lib, card)
	if nvmlx.IsAbsent(ret) || ret == nvml.ERROR_FUNCTION_NOT_FOUND {
		return "", nil
	}
	if ret != nvml.SUCCESS {
		return "", fmt.Errorf("read its fabric state: %w", nvmlx.ToError(ret))
	}
	switch state {
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "the GPU has not started to register with the fabric", nil
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "the GPU is registering with the fabric", nil
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		if status != nvml.SUCCESS {
			return "", r.fail(device.FailureOther, "the GPU could not register with the fabric (%v): check the log of nvidia-fabricmanager",
				nvmlx.ToError(status))
		}
	}
	return "", nil
}
