package steps

import (
	"cmp"
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const ComputeModeKind = "compute-mode"

// ComputeMode is the step that sets a GPU's compute mode to exclusive process, so that only the MPS
// server can use the GPU directly.
type ComputeMode struct {
	change
	SettingState[device.ComputeMode]
}

var _ Sharable = &ComputeMode{}

var computeModes = gpuSetting[device.ComputeMode]{
	name: "compute mode",
	read: func(ctx context.Context, env *Env, card device.Card) (device.ComputeMode, error) {
		state, err := env.CardState(ctx, card)
		return cmp.Or(state.ComputeMode, device.ComputeDefault), err
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.ComputeMode) error {
		defer env.forgetCard(card)
		return env.Partitions.SetComputeMode(ctx, card, to)
	},
	format: func(mode device.ComputeMode) string { return string(mode) },
}

func (s *ComputeMode) Kind() string { return ComputeModeKind }

func (s *ComputeMode) describe() string {
	return fmt.Sprintf("compute mode %s on %s", device.ComputeExclusiveProcess, s.GPU)
}

func (s *ComputeMode) assumeDefaults() {
	found := device.ComputeDefault
	s.Found = &found
}

func (s *ComputeMode) reset(ctx context.Context, env *Env, of string) error {
	return resetSetting(ctx, env, of, &s.SettingState, s)
}

func (s *ComputeMode) Apply(ctx context.Context, env *Env) error {
	return computeModes.apply(ctx, env, &s.SettingState, device.ComputeExclusiveProcess)
}

func (s *ComputeMode) maintain(ctx context.Context, env *Env) error {
	return computeModes.maintain(ctx, env, &s.SettingState, device.ComputeExclusiveProcess)
}

func (s *ComputeMode) Revert(ctx context.Context, env *Env) error {
	return computeModes.revert(ctx, env, &s.SettingState)
}
