package steps

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const MIGModeOffKind = "mig-mode-off"

// MIGModeOff is the step that disables MIG mode on a GPU without MIG instances, so that the whole
// GPU can be used. Its Revert does nothing: the step that creates the next partition enables the
// mode. So no record needs it, but older versions recorded it.
type MIGModeOff struct {
	GPU   string      `json:"gpu"`
	Card  device.Card `json:"card"`
	Minor int         `json:"minor"`
}

var _ Step = &MIGModeOff{}

// NeedsHardware implements [Step].
func (*MIGModeOff) NeedsHardware() bool { return false }

func (s *MIGModeOff) Kind() string { return MIGModeOffKind }

func (s *MIGModeOff) Apply(ctx context.Context, env *Env) error {
	defer env.forgetCard(s.Card)
	state, err := DisableMIGMode(ctx, env, s.Card, s.GPU)
	if err != nil {
		return err
	}
	return CheckDeviceNode(s.GPU, s.Minor, state.Minor)
}

// DisableMIGMode disables MIG mode. Then it removes the file that says that this driver enabled the
// mode.
func DisableMIGMode(ctx context.Context, env *Env, card device.Card, gpu string) (device.CardState, error) {
	state, err := env.Partitions.SetMode(ctx, card, false)
	if err != nil {
		return state, fmt.Errorf("disable MIG mode of %s: %w", gpu, err)
	}
	if state.MIG.Enabled {
		return state, fmt.Errorf("disable MIG mode of %s: it is still enabled (pending: %v): the GPU may need a reset", gpu, state.MIG.Pending)
	}
	return state, env.Records.Unmark(gpu)
}

func (s *MIGModeOff) Revert(context.Context, *Env) error { return nil }
