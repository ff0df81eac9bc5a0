package nvidia

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// setMode changes the MIG mode, unless it is as wanted or the watcher still has the card open.
func (c cutter) setMode(r request) (*State, error) {
	s, err := retryTransient(r.Patience, func() (*State, error) { return c.trySetMode(r) })
	return s, c.nameHolders(r, err)
}

// nameHolders lists who has the card open, after the last try only: it walks all of /proc.
func (c cutter) nameHolders(r request, err error) error {
	var refusal *CutError
	if errors.As(err, &refusal) && refusal.held {
		if card, failure := c.open(r); failure == nil {
			refusal.Processes = c.holders(card, nil)
		}
	}
	return err
}

// transientLimit is how long a GPU may be in use while no process computes on it. NVML may open all
// GPUs in the worker of another one, which may be cutting and then ends after idleLimit.
const transientLimit = 10 * time.Second

// retryFor is how long a worker may retry: the call has to end with the refusal, not with its context.
func retryFor(ctx context.Context) time.Duration {
	end, ok := ctx.Deadline()
	if !ok {
		return transientLimit
	}
	return min(transientLimit, time.Until(end)-2*lastPause)
}

// retryTransient retries while the GPU is in use and no process computes on it. A process that only
// looks, such as our own scan, soon ends.
func retryTransient[T any](limit time.Duration, try func() (T, error)) (T, error) {
	began := time.Now()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		made, err := try()
		var refusal *CutError
		if !errors.As(err, &refusal) || !refusal.passing || time.Since(began)+pause > limit {
			return made, err
		}
		<-time.After(pause)
	}
}

// trySetMode goes by the mode that is in force afterwards, whatever NVML answers.
func (c cutter) trySetMode(r request) (*State, error) {
	card, err := c.open(r)
	if err != nil {
		return nil, err
	}
	before, err := c.modeOf(r, card)
	if err != nil {
		return nil, err
	}
	if before.Enabled == r.On || r.Watched {
		return c.state(card)
	}
	activation, ret := card.SetMigMode(modeNumber(r.On))
	// The change may have reset the card: its handle, and with it everything that was read, is not to be relied on.
	if card, err = c.open(r); err != nil {
		return nil, err
	}
	now, err := c.modeOf(r, card)
	if err != nil {
		return nil, err
	}
	if now.Enabled == r.On {
		return c.state(card)
	}
	if ret == nvml.SUCCESS {
		ret = activation
	}
	refusal := c.modeRefusal(r, card, ret)
	if now.Pending != before.Pending { // else the next reset, whoever does it, would change the mode behind everybody's back
		if _, ret := card.SetMigMode(modeNumber(before.Pending)); ret != nvml.SUCCESS {
			refusal.Message += fmt.Sprintf("; the mode changes at the next reset of the GPU, because that could not be taken back (%v)", toError(ret))
		}
	}
	return nil, refusal
}

func modeNumber(on bool) int {
	if on {
		return nvml.DEVICE_MIG_ENABLE
	}
	return nvml.DEVICE_MIG_DISABLE
}

// modeRefusal explains why the mode has not changed.
func (c cutter) modeRefusal(r request, card nvml.Device, ret nvml.Return) *CutError {
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED:
		return r.fail(CodeReset, "this machine changes the mode with a reset of the GPU only: set it while nothing runs (nvidia-smi -mig), "+
			"let the plugin release the GPUs (annotate the Node with gpu.nvidia.com/release-driver=true) and reset (nvidia-smi --gpu-reset), or reboot")
	case nvml.ERROR_IN_USE:
		if there := c.listed(card); there > 0 {
			return r.fail(CodeInUse, "it has %d GPU instances, which have to be destroyed first (nvidia-smi mig -lgi lists them)", there)
		}
		return c.inUse(r, card, ret)
	default:
		return c.because(r, toError(ret))
	}
}

// inUse explains a refusal about the card. [cutter.nameHolders] names who has it open.
func (c cutter) inUse(r request, card nvml.Device, ret nvml.Return) *CutError {
	refusal := c.because(r, toError(ret))
	refusal.passing = len(c.processes(card, nil)) == 0
	refusal.held = true
	return refusal
}

// listed counts the GPU instances of a card, as far as NVML says.
func (c cutter) listed(card nvml.Device) int {
	n := 0
	kinds, _ := c.readKinds(card)
	for _, k := range kinds {
		if handles, ret := card.GetGpuInstances(&k.GpuInstanceProfileInfo); ret == nvml.SUCCESS {
			n += len(handles)
		}
	}
	return n
}

// fabric says what the NVLink fabric of the card is still doing. Where there is none there is nothing to wait for.
func (c cutter) fabric(r request) (string, error) {
	card, err := c.open(r)
	if err != nil {
		return "", err
	}
	state, status, ret := c.fabricInfo(card)
	if isAbsent(ret) || ret == nvml.ERROR_FUNCTION_NOT_FOUND {
		return "", nil
	}
	if ret != nvml.SUCCESS {
		return "", fmt.Errorf("read its fabric state: %w", toError(ret))
	}
	switch state {
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "the GPU has not begun to register with the fabric", nil
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "the GPU is registering with the fabric", nil
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		if status != nvml.SUCCESS {
			return "", r.fail(CodeOther, "the GPU could not register with the fabric (%v): look at nvidia-fabricmanager's log", toError(status))
		}
	}
	return "", nil
}

func (m *migReader) fabricInfo(card nvml.Device) (state uint8, status, ret nvml.Return) {
	if m.has("nvmlDeviceGetGpuFabricInfoV") {
		info, ret := card.GetGpuFabricInfoV().V2()
		return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
	}
	if !m.has("nvmlDeviceGetGpuFabricInfo") {
		return 0, nvml.SUCCESS, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	info, ret := card.GetGpuFabricInfo()
	return info.State, nvml.Return(info.Status), ret //nolint:gosec // NVML's own number
}
