package prepare

import (
	"cmp"
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const computeModeKind = "compute-mode"

// computeMode keeps all processes but the server of MPS from a GPU.
type computeMode struct{ setting[device.ComputeMode] }

var _ sharable = &computeMode{}

var computeModes = knob[device.ComputeMode]{
	name: "compute mode",
	now: func(ctx context.Context, env *Env, card device.Card) (device.ComputeMode, error) {
		state, err := env.Looks.at(ctx, card)
		return cmp.Or(state.ComputeMode, device.ComputeDefault), err
	},
	set: func(ctx context.Context, env *Env, card device.Card, to device.ComputeMode) error {
		defer env.Looks.forget(card)
		return env.Partitions.SetComputeMode(ctx, card, to)
	},
	say: func(mode device.ComputeMode) string { return string(mode) },
}

func (s *computeMode) Kind() string { return computeModeKind }

func (s *computeMode) wanted() string {
	return fmt.Sprintf("compute mode %s on %s", device.ComputeExclusiveProcess, s.GPU)
}

func (s *computeMode) unknown() {
	found := device.ComputeDefault
	s.Found = &found
}

func (s *computeMode) Apply(ctx context.Context, env *Env) error {
	return computeModes.apply(ctx, env, &s.setting, device.ComputeExclusiveProcess)
}

func (s *computeMode) keep(ctx context.Context, env *Env) error {
	return computeModes.keep(ctx, env, &s.setting, device.ComputeExclusiveProcess)
}

func (s *computeMode) Revert(ctx context.Context, env *Env) error {
	return computeModes.revert(ctx, env, &s.setting)
}
