package steps

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// MakeWhole disables MIG mode on a GPU without MIG instances, so that the whole GPU can be used. It
// is no step, because nothing must revert it: creating the next partition enables the mode.
func MakeWhole(ctx context.Context, env *Env, g device.GPU) error {
	defer env.forgetCard(g.Card())
	state, err := DisableMIGMode(ctx, env, g.Card(), g.WholeName())
	if err != nil {
		return err
	}
	return CheckDeviceNode(g.WholeName(), g.Minor, state.Minor)
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
