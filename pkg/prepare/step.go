package prepare

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

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
	ClaimUID        types.UID
	Namespace, Name string
	BootID          string
	Now             func() time.Time
	Specs           Specs
	Partitions      Partitions
	MPS             Daemons
	// Looks are what was seen of the hardware within the call.
	Looks   *looks
	Records *checkpoint.Store
	// Journal writes what the steps know by now into the claim's record.
	Journal func() error
	// Forgotten says that the record is of an earlier boot: whatever was cut for it is gone.
	Forgotten bool
	// Present says whether the card may still be in the node.
	Present func(device.Card) bool
	// UUID is that of one of the claim's devices, by the device's name.
	UUID func(device string) (string, error)
	// Sharers are the claims whose records say, or may say, that they hold a step together.
	Sharers func(key string, gpus []string) ([]types.UID, error)
	// Round is the comparison within which the steps are applied. It is nil in a call for one claim.
	Round *round
}

// stepKinds knows every step that a record can hold. A kind that is missing here would make old records impossible to revert: kinds are never removed.
var stepKinds = map[string]func() Step{
	claimSpecKind:   func() Step { return &claimSpec{} },
	migInstanceKind: func() Step { return &migInstance{} },
	migModeOffKind:  func() Step { return &migModeOff{} },
	sharedKind:      func() Step { return &shared{} },
}

// store is what stands in the record, given what has stood there for the same steps, as far as there is any. Those of one kind have kept their order.
func store(steps []Step, before []checkpoint.Step) ([]checkpoint.Step, error) {
	stored, left := make([]checkpoint.Step, len(steps)), slices.Clone(before)
	for i, s := range steps {
		var old checkpoint.Step
		if at := slices.IndexFunc(left, func(b checkpoint.Step) bool { return b.Kind == s.Kind() }); at >= 0 {
			old = left[at]
			left = slices.Delete(left, at, at+1)
		}
		var err error
		if stored[i], err = storeOver(old, s); err != nil {
			return nil, err
		}
	}
	return stored, nil
}

func storeOne(s Step) (checkpoint.Step, error) {
	params, err := json.Marshal(s)
	if err != nil {
		return checkpoint.Step{}, fmt.Errorf("store step %s: %w", s.Kind(), err)
	}
	return checkpoint.Step{Kind: s.Kind(), Params: params}, nil
}

func restore(stored []checkpoint.Step) ([]Step, error) {
	steps := make([]Step, len(stored))
	for i, s := range stored {
		var err error
		if steps[i], err = restoreOne(stepKinds, s); err != nil {
			return nil, err
		}
	}
	return steps, nil
}

func restoreOne[S Step](kinds map[string]func() S, stored checkpoint.Step) (step S, err error) {
	empty, known := kinds[stored.Kind]
	if !known {
		return step, &lastingError{fmt.Errorf("step %q was recorded by another version of the driver, and this one cannot revert it: install that version again", stored.Kind)}
	}
	step = empty()
	if err := json.Unmarshal(stored.Params, step); err != nil {
		return step, &lastingError{fmt.Errorf("step %q of the record: %w", stored.Kind, err)}
	}
	return step, nil
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

// hard says whether reverting the steps takes the hardware, or a daemon.
func hard(steps []Step) bool {
	for _, s := range steps {
		switch s.(type) {
		case *migInstance, *shared:
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
