package prepare

import (
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Step is one reversible part of a preparation. Apply may run again after it ran in whole or in part; so may Revert, also where Apply never ran.
type Step interface {
	Kind() string
	Apply(ctx context.Context, env *Env) error
	Revert(ctx context.Context, env *Env) error
}

// Env is what steps work on.
type Env struct {
	ClaimUID   types.UID
	Specs      Specs
	Partitions Partitions
	// Looks are what was seen of the hardware within the call.
	Looks   *looks
	Records *checkpoint.Store
	// Journal writes what the steps know by now into the claim's record.
	Journal func() error
	// Forgotten says that the record is of an earlier boot: whatever was cut for it is gone.
	Forgotten bool
	// Present says whether the card may still be in the node.
	Present func(device.Card) bool
}

// stepKinds knows every step that a record can hold. A kind that is missing here would make old records impossible to revert: kinds are never removed.
var stepKinds = map[string]func() Step{
	claimSpecKind:   func() Step { return &claimSpec{} },
	migInstanceKind: func() Step { return &migInstance{} },
	migModeOffKind:  func() Step { return &migModeOff{} },
}

func store(steps []Step) ([]checkpoint.Step, error) {
	stored := make([]checkpoint.Step, len(steps))
	for i, s := range steps {
		params, err := json.Marshal(s)
		if err != nil {
			return nil, fmt.Errorf("store step %s: %w", s.Kind(), err)
		}
		stored[i] = checkpoint.Step{Kind: s.Kind(), Params: params}
	}
	return stored, nil
}

func restore(stored []checkpoint.Step) ([]Step, error) {
	steps := make([]Step, len(stored))
	for i, s := range stored {
		empty, known := stepKinds[s.Kind]
		if !known {
			return nil, fmt.Errorf("step %q was recorded by another version of the driver, and this one cannot revert it: install that version again", s.Kind)
		}
		steps[i] = empty()
		if err := json.Unmarshal(s.Params, steps[i]); err != nil {
			return nil, fmt.Errorf("step %q of the record: %w", s.Kind, err)
		}
	}
	return steps, nil
}

// lasting are the steps that leave something to revert. The others are not in the record of a claim that is prepared.
func lasting(steps []Step) []Step {
	var left []Step
	for _, s := range steps {
		if _, done := s.(*migModeOff); !done {
			left = append(left, s)
		}
	}
	return left
}

// cuts says whether reverting the steps takes the hardware.
func cuts(steps []Step) bool {
	for _, s := range steps {
		if _, ok := s.(*migInstance); ok {
			return true
		}
	}
	return false
}

func applyAll(ctx context.Context, env *Env, steps []Step) error {
	for _, s := range steps {
		if err := s.Apply(ctx, env); err != nil {
			return fmt.Errorf("apply step %s: %w", s.Kind(), err)
		}
	}
	return nil
}

func revertAll(ctx context.Context, env *Env, steps []Step) error {
	for i := len(steps) - 1; i >= 0; i-- {
		if err := steps[i].Revert(ctx, env); err != nil {
			return fmt.Errorf("revert step %s: %w", steps[i].Kind(), err)
		}
	}
	return nil
}
