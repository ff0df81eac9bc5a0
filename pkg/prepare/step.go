package prepare

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Step is one reversible part of a preparation. Apply may be called again after it ran completely
// or in part. Revert may be called again too, and also if Apply never ran.
type Step interface {
	Kind() string
	Apply(ctx context.Context, env *Env) error
	Revert(ctx context.Context, env *Env) error
}

// Env is what a step needs to run: the claim, access to the hardware, and the stores of records and
// CDI specs.
type Env struct {
	ClaimUID        types.UID
	Namespace, Name string
	BootID          string
	Now             func() time.Time
	Specs           Specs
	Partitions      Partitions
	MPS             Daemons
	// Cards caches the state of the cards during the call.
	Cards   *cardStates
	Records *checkpoint.Store
	// Journal saves the current state of the steps: in the claim's record, or in the separate file of
	// a setting, partition or daemon that several claims share.
	Journal func() error
	// EarlierBoot means that the record was written in an earlier boot, so that its partitions no
	// longer exist.
	EarlierBoot bool
	// Present reports whether the card may still be in the node.
	Present func(device.Card) bool
	// UUID returns the UUID of the claim's device with this name.
	UUID func(device string) (string, error)
	// ClaimsSharing returns the claims on the GPUs whose records name the shared setting, partition or
	// daemon with this key, or cannot be read.
	ClaimsSharing func(key string, gpus []string) ([]types.UID, error)
	// Pass is the Reconcile pass in which the steps run. It is nil outside Reconcile.
	Pass *reconcilePass
}

// stepKinds maps each kind of step that a record can have to its constructor. Never remove a kind,
// because records that contain it could not be reverted.
var stepKinds = map[string]func() Step{
	claimSpecKind:   func() Step { return &claimSpec{} },
	migInstanceKind: func() Step { return &migInstance{} },
	migModeOffKind:  func() Step { return &migModeOff{} },
	sharedKind:      func() Step { return &sharedStep{} },
}

// encodeSteps encodes the steps for the claim's record.
func encodeSteps(steps []Step) ([]checkpoint.Step, error) {
	stored := make([]checkpoint.Step, len(steps))
	for i, s := range steps {
		var err error
		if stored[i], err = encodeStep(s); err != nil {
			return nil, err
		}
	}
	return stored, nil
}

func encodeStep(s Step) (checkpoint.Step, error) {
	params, err := json.Marshal(s)
	if err != nil {
		return checkpoint.Step{}, fmt.Errorf("store step %s: %w", s.Kind(), err)
	}
	return checkpoint.Step{Kind: s.Kind(), Params: params}, nil
}

func decodeSteps(stored []checkpoint.Step) ([]Step, error) {
	steps := make([]Step, len(stored))
	for i, s := range stored {
		var err error
		if steps[i], err = decodeStep(stepKinds, s); err != nil {
			return nil, err
		}
	}
	return steps, nil
}

func decodeStep[S Step](kinds map[string]func() S, stored checkpoint.Step) (step S, err error) {
	empty, known := kinds[stored.Kind]
	if !known {
		return step, &permanentError{fmt.Errorf("another version of the driver recorded step %q, and this version cannot revert it: "+
			"install that version again", stored.Kind)}
	}
	step = empty()
	if err := json.Unmarshal(stored.Params, step); err != nil {
		return step, &permanentError{fmt.Errorf("step %q of the record: %w", stored.Kind, err)}
	}
	return step, nil
}

// lastingSteps returns the steps that stay in the record of a prepared claim, because they must be
// reverted later. It leaves out those that disable MIG mode.
func lastingSteps(steps []Step) []Step {
	var lasting []Step
	for _, s := range steps {
		if _, done := s.(*migModeOff); !done {
			lasting = append(lasting, s)
		}
	}
	return lasting
}

// needsHardware reports whether reverting the steps may need the hardware or an MPS daemon.
func needsHardware(steps []Step) bool {
	for _, s := range steps {
		switch s.(type) {
		case *migInstance, *sharedStep:
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
