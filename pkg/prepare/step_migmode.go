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
	state, err := env.Partitions.SetMode(ctx, s.Card, false)
	if err != nil {
		return fmt.Errorf("turn off MIG mode of %s, which is wanted whole: %w", s.GPU, err)
	}
	if state.MIG.Enabled {
		return fmt.Errorf("turn off MIG mode of %s, which is wanted whole: it is still on (pending: %v): the GPU may need a reset", s.GPU, state.MIG.Pending)
	}
	if err := env.Records.Unmark(s.GPU); err != nil {
		return err
	}
	return sameNode(s.GPU, s.Minor, state.Minor)
}

func (s *migModeOff) Revert(context.Context, *Env) error { return nil }
