package prepare

import (
	"cmp"
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const computeModeKind = "compute-mode"

// computeMode is the step that sets a GPU's compute mode to exclusive process, so that only the MPS
// server can use the GPU directly.
type computeMode struct {
	settingState[device.ComputeMode]
}

var _ sharableStep = &computeMode{}

var computeModes = gpuSetting[device.ComputeMode]{
	name: "compute mode",
	read: func(ctx context.Context, env *Env, card device.Card) (device.ComputeMode, error) {
		state, err := env.Cards.get(ctx, card)
		return cmp.Or(state.ComputeMode, device.ComputeDefault), err
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.ComputeMode) error {
		defer env.Cards.invalidate(card)
		return env.Partitions.SetComputeMode(ctx, card, to)
	},
	format: func(mode device.ComputeMode) string { return string(mode) },
}

func (s *computeMode) Kind() string { return computeModeKind }

func (s *computeMode) describe() string {
	return fmt.Sprintf("compute mode %s on %s", device.ComputeExclusiveProcess, s.GPU)
}

func (s *computeMode) assumeDefaults() {
	found := device.ComputeDefault
	s.Found = &found
}

func (s *computeMode) Apply(ctx context.Context, env *Env) error {
	return computeModes.apply(ctx, env, &s.settingState, device.ComputeExclusiveProcess)
}

func (s *computeMode) maintain(ctx context.Context, env *Env) error {
	return computeModes.maintain(ctx, env, &s.settingState, device.ComputeExclusiveProcess)
}

func (s *computeMode) Revert(ctx context.Context, env *Env) error {
	return computeModes.revert(ctx, env, &s.settingState)
}
