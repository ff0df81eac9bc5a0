package prepare

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Settings changes how processes share a GPU: its compute mode and its time slice.
type Settings interface {
	// SetComputeMode sets the compute mode. It changes nothing if the GPU already has this mode.
	SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error
	TimeSlice(ctx context.Context, card device.Card) (device.TimeSlice, error)
	SetTimeSlice(ctx context.Context, card device.Card, slice device.TimeSlice) error
}

// mayBeForgotten logs a message if the NVIDIA driver will lose a setting when the last process
// closes the GPU. The parameter "what" names the setting. Reconcile sets it again while claims need
// it.
func (e *Env) mayBeForgotten(ctx context.Context, card device.Card, gpu, what string) {
	state, err := e.Cards.get(ctx, card)
	if err != nil || state.Persistence == nil || *state.Persistence {
		return
	}
	klog.FromContext(ctx).Info("Persistence mode is off: GPU settings are lost when the last process closes the GPU and are restored later; "+
		"enable persistence mode (nvidia-persistenced, or nvidia-smi -pm 1)",
		"gpu", gpu, "setting", what)
}

// isUnset reports whether err, from an attempt to restore a GPU setting, means that nothing is left
// to restore: the card or the NVIDIA driver is gone, or the GPU no longer supports the setting.
func (e *Env) isUnset(ctx context.Context, card device.Card, gpu string, err error) bool {
	unset := failureCode(err) == device.FailureNotSupported || e.isCardGone(card, err)
	if unset {
		klog.FromContext(ctx).Info("Skipped restoring a GPU setting: the GPU is gone, was reset, or does not support it",
			"gpu", gpu, "reason", err.Error())
	}
	return unset
}
