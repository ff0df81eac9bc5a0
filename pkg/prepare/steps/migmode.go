package steps

import (
	"context"
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// DisableMIGMode disables MIG mode. Then it removes the file that says that this driver enabled the
// mode.
func DisableMIGMode(ctx context.Context, env *Env, card device.Card, gpu string) (device.CardState, error) {
	defer env.forgetCard(card)
	state, err := env.Partitions.SetMode(ctx, card, false)
	if err != nil {
		return state, fmt.Errorf("disable MIG mode of %s: %w", gpu, err)
	}
	if state.MIG.Enabled {
		return state, fmt.Errorf("disable MIG mode of %s: it is still enabled (pending: %v): the GPU may need a reset", gpu, state.MIG.Pending)
	}
	return state, env.Records.Unmark(gpu)
}
