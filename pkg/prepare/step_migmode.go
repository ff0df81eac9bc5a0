package prepare

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const migModeOffKind = "mig-mode-off"

// migModeOff is the step that disables MIG mode on a GPU without MIG instances, so that the whole
// GPU can be used. Its Revert does nothing: the step that creates the next partition enables the
// mode.
type migModeOff struct {
	GPU   string      `json:"gpu"`
	Card  device.Card `json:"card"`
	Minor int         `json:"minor"`
}

var _ Step = &migModeOff{}

func (s *migModeOff) Kind() string { return migModeOffKind }

func (s *migModeOff) Apply(ctx context.Context, env *Env) error {
	defer env.Cards.invalidate(s.Card)
	state, err := disableMIGMode(ctx, env, s.Card, s.GPU)
	if err != nil {
		return err
	}
	return checkDeviceNode(s.GPU, s.Minor, state.Minor)
}

// disableMIGMode disables MIG mode. Then it removes the file that says that this driver enabled the
// mode.
func disableMIGMode(ctx context.Context, env *Env, card device.Card, gpu string) (device.CardState, error) {
	state, err := env.Partitions.SetMode(ctx, card, false)
	if err != nil {
		return state, fmt.Errorf("disable MIG mode of %s: %w", gpu, err)
	}
	if state.MIG.Enabled {
		return state, fmt.Errorf("disable MIG mode of %s: it is still enabled (pending: %v): the GPU may need a reset", gpu, state.MIG.Pending)
	}
	return state, env.Records.Unmark(gpu)
}

func (s *migModeOff) Revert(context.Context, *Env) error { return nil }
