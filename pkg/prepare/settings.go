package prepare

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Settings is the hardware, as far as it is set how processes share a GPU.
type Settings interface {
	// SetComputeMode changes nothing where the mode is that already.
	SetComputeMode(ctx context.Context, card device.Card, mode device.ComputeMode) error
	TimeSlice(ctx context.Context, card device.Card) (device.TimeSlice, error)
	SetTimeSlice(ctx context.Context, card device.Card, slice device.TimeSlice) error
}

// mayBeForgotten tells whoever runs the node that the driver does not keep what is set. It is set again while claims hold it.
func (e *Env) mayBeForgotten(ctx context.Context, card device.Card, gpu, what string) {
	state, err := e.Looks.at(ctx, card)
	if err != nil || state.Persistence == nil || *state.Persistence {
		return
	}
	klog.FromContext(ctx).Info("Persistence mode is off: the driver forgets what is set whenever the last process closes the GPU, and it is set again then; turn persistence mode on (nvidia-persistenced, or nvidia-smi -pm 1)",
		"gpu", gpu, "setting", what)
}

// isUnset says whether a setting that could not be set back is gone with the driver or the card, or is none that the GPU has now.
func (e *Env) isUnset(ctx context.Context, card device.Card, gpu string, err error) bool {
	unset := cutCode(err) == device.CutNotSupported || e.hasGone(card, err)
	if unset {
		klog.FromContext(ctx).Info("What was set on a GPU is gone already", "gpu", gpu, "reason", err.Error())
	}
	return unset
}
