package prepare

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const migModeOffKind = "mig-mode-off"

// migModeOff makes a GPU whole again that was left in MIG mode without instances. There is nothing to revert: whoever cuts the GPU next turns the mode on.
type migModeOff struct {
	GPU   string      `json:"gpu"`
	Card  device.Card `json:"card"`
	Minor int         `json:"minor"`
}

var _ Step = &migModeOff{}

func (s *migModeOff) Kind() string { return migModeOffKind }

func (s *migModeOff) Apply(ctx context.Context, env *Env) error {
	defer env.Looks.forget(s.Card)
	state, err := turnOff(ctx, env, s.Card, s.GPU)
	if err != nil {
		return err
	}
	return sameNode(s.GPU, s.Minor, state.Minor)
}

// turnOff turns MIG mode off, and then forgets that we turned it on.
func turnOff(ctx context.Context, env *Env, card device.Card, gpu string) (device.CutState, error) {
	state, err := env.Partitions.SetMode(ctx, card, false)
	if err != nil {
		return state, fmt.Errorf("turn off MIG mode of %s: %w", gpu, err)
	}
	if state.MIG.Enabled {
		return state, fmt.Errorf("turn off MIG mode of %s: it is still on (pending: %v): the GPU may need a reset", gpu, state.MIG.Pending)
	}
	return state, env.Records.Unmark(gpu)
}

func (s *migModeOff) Revert(context.Context, *Env) error { return nil }
