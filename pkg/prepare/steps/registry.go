package steps

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// kinds has a constructor for each kind of step that a claim's record can have. Never remove a
// kind, because records that contain it could not be reverted.
var kinds = []func() Step{
	func() Step { return &Passthrough{} },
	func() Step { return &MIGInstance{} },
	func() Step { return &Shared{} },
	func() Step { return &ClaimSpec{} },
}

// sharables has a constructor for each kind of step that claims can share, in the order in which a
// claim applies them. Never remove a kind, because recorded steps of that kind could not be
// reverted.
var sharables = []func() Sharable{
	func() Sharable { return &MIGInstance{} },
	func() Sharable { return NewExclusiveMode("", device.Card{}) },
	func() Sharable { return NewTimeSlice("", device.Card{}, device.TimeSliceDefault) },
	func() Sharable { return &MPSDaemon{} },
}

// SortShared sorts shared steps into the order in which a claim applies them.
func SortShared(list []*Shared) {
	slices.SortStableFunc(list, func(a, b *Shared) int { return cmp.Compare(order(a.Key), order(b.Key)) })
}

func order(key string) int {
	_, kind := SplitKey(key)
	return slices.IndexFunc(sharables, func(empty func() Sharable) bool { return empty().Kind() == kind })
}

// Decode returns the steps of a claim's record. The error is permanent if this version of the
// driver does not know one of them.
func Decode(stored []checkpoint.Step) ([]Step, error) {
	list := make([]Step, len(stored))
	for i, s := range stored {
		var err error
		if list[i], err = decodeStep(kinds, s); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func decodeSharable(stored checkpoint.Step) (Sharable, error) { return decodeStep(sharables, stored) }

func decodeStep[S Step](constructors []func() S, stored checkpoint.Step) (none S, _ error) {
	for _, empty := range constructors {
		step := empty()
		if step.Kind() != stored.Kind {
			continue
		}
		if err := json.Unmarshal(stored.Params, step); err != nil {
			return step, fmt.Errorf("step %q of the record: %w", stored.Kind, err)
		}
		return step, nil
	}
	return none, fmt.Errorf("another version of the driver recorded step %q, and this version cannot revert it: "+
		"install that version again", stored.Kind)
}

// ResetToDefault resets the GPU setting, or stops the MPS daemon, that the key of a shared step
// names. It is for a step whose file is unreadable. A MIG instance stays.
func ResetToDefault(ctx context.Context, env *Env, key string) error {
	of, kind := SplitKey(key)
	for _, empty := range sharables {
		if step := empty(); step.Kind() == kind {
			return step.reset(ctx, env, of)
		}
	}
	return nil
}
