package steps

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Step is one reversible part of a preparation. Apply may be called again after it ran completely
// or in part. Revert may be called again too, and also if Apply never ran.
type Step interface {
	Kind() string
	Apply(ctx context.Context, env *Env) error
	Revert(ctx context.Context, env *Env) error
	// Lasting reports whether the step stays in the record of a prepared claim, because it must be
	// reverted later.
	Lasting() bool
	// NeedsHardware reports whether Revert may need the hardware or an MPS daemon.
	NeedsHardware() bool
}

// Sharable is a step that several claims can share, such as a time slice or an MPS daemon. Before
// its Apply changes anything that Revert must restore, Apply calls the Journal of its Env.
type Sharable interface {
	Step
	// maintain makes sure that the effect of the step still exists while claims share the step. It
	// does not disturb running processes.
	maintain(ctx context.Context, env *Env) error
	// describe returns in words what the step does. Claims can share a step only if their descriptions
	// are equal.
	describe() string
	// assumeDefaults makes the next Revert restore the hardware's default. It is for a step whose
	// original state is unknown.
	assumeDefaults()
	// reset restores the hardware's default. The step is empty. The parameter "of" names the GPU,
	// partition or daemon that the step's key names.
	reset(ctx context.Context, env *Env, of string) error
	// preference reports whether the last claim may end although its Revert failed. Reconcile then
	// reverts the step later.
	preference() bool
}

// Creator is a step that creates a partition: a [MIGInstance] for one claim, or a [Shared] that
// wraps one.
type Creator interface {
	Step
	// Partition returns the name under which the partition is allocated.
	Partition() string
	// MIG returns the step that creates the partition. It is nil for a Shared whose state is not
	// loaded.
	MIG() *MIGInstance
	// Load reads the state that claims share from its file, if the step is shared.
	Load(records *checkpoint.Store, bootID string) error
	// Recreate reverts the step and applies it again. Between the two it calls ready, which may change
	// the step, or return an error and so leave the partition away.
	Recreate(ctx context.Context, env *Env, ready func(*MIGInstance) error) error
}

// AsCreator returns the step as a Creator. It returns false if the step creates no partition.
func AsCreator(s Step) (Creator, bool) {
	if shared, ok := s.(*Shared); ok {
		of, kind := SplitKey(shared.Key)
		_, known := device.ParseName(of)
		return shared, known && kind == MIGInstanceKind
	}
	c, ok := s.(Creator)
	return c, ok
}

// change has what all steps have in common that change hardware or MPS daemons.
type change struct{}

func (change) Lasting() bool       { return true }
func (change) NeedsHardware() bool { return true }
func (change) preference() bool    { return false }

// Of returns those of the steps that have the type S.
func Of[S Step](list []Step) []S {
	var found []S
	for _, step := range list {
		if s, ok := step.(S); ok {
			found = append(found, s)
		}
	}
	return found
}

// NeedsHardware reports whether reverting the steps may need the hardware or an MPS daemon.
func NeedsHardware(list []Step) bool { return slices.ContainsFunc(list, Step.NeedsHardware) }

// ApplyAll applies the steps in order.
func ApplyAll[S Step](ctx context.Context, env *Env, list []S) error {
	for _, s := range list {
		if err := s.Apply(ctx, env); err != nil {
			return fmt.Errorf("apply step %s: %w", s.Kind(), err)
		}
	}
	return nil
}

// RevertAll reverts the steps in reverse order.
func RevertAll(ctx context.Context, env *Env, list []Step) error {
	for i := len(list) - 1; i >= 0; i-- {
		if err := list[i].Revert(ctx, env); err != nil {
			return fmt.Errorf("revert step %s: %w", list[i].Kind(), err)
		}
	}
	return nil
}
