package steps

import (
	"cmp"
	"context"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const ComputeModeKind = "compute-mode"

// NewExclusiveMode returns the step that sets a GPU's compute mode to exclusive process, so that
// only the MPS server can use the GPU directly.
func NewExclusiveMode(gpu string, card device.Card) *Setting[device.ComputeMode] {
	return &Setting[device.ComputeMode]{about: &computeModes, GPU: gpu, Card: card, Want: device.ComputeExclusiveProcess}
}

var computeModes = gpuSetting[device.ComputeMode]{
	kind: ComputeModeKind, name: "compute mode", phrase: "compute mode",
	read: func(ctx context.Context, env *Env, card device.Card) (device.ComputeMode, error) {
		state, err := env.CardState(ctx, card)
		return cmp.Or(state.ComputeMode, device.ComputeDefault), err
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.ComputeMode) error {
		defer env.forgetCard(card)
		return env.Partitions.SetComputeMode(ctx, card, to)
	},
	format:   func(mode device.ComputeMode) string { return string(mode) },
	standard: device.ComputeDefault,
}
