package prepare

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const computeModeKind = "compute-mode"

// computeMode keeps all processes but the server of MPS from a GPU.
type computeMode struct {
	GPU  string      `json:"gpu"`
	Card device.Card `json:"card"`
	// Found is what it was before. It is nil while nothing was changed.
	Found *device.ComputeMode `json:"found,omitempty"`
}

var _ sharable = &computeMode{}

func (s *computeMode) Kind() string { return computeModeKind }

func (s *computeMode) wanted() string {
	return fmt.Sprintf("compute mode %s on %s", device.ComputeExclusiveProcess, s.GPU)
}

func (s *computeMode) unknown() {
	found := device.ComputeDefault
	s.Found = &found
}

func (s *computeMode) Apply(ctx context.Context, env *Env) error {
	state, err := env.Looks.at(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	found := state.ComputeMode
	if found == "" {
		found = device.ComputeDefault
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	env.mayBeForgotten(ctx, s.Card, s.GPU, "compute mode")
	return s.set(ctx, env, device.ComputeExclusiveProcess)
}

func (s *computeMode) keep(ctx context.Context, env *Env) error {
	state, err := env.Looks.at(ctx, s.Card)
	if err != nil {
		return s.failed(err)
	}
	if state.ComputeMode == device.ComputeExclusiveProcess {
		return nil
	}
	klog.FromContext(ctx).Info("Setting the compute mode of a GPU again, which is not what its claims need", "gpu", s.GPU, "now", state.ComputeMode)
	return s.set(ctx, env, device.ComputeExclusiveProcess)
}

func (s *computeMode) Revert(ctx context.Context, env *Env) error {
	if s.Found == nil {
		return nil
	}
	if err := s.set(ctx, env, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

func (s *computeMode) set(ctx context.Context, env *Env, to device.ComputeMode) error {
	defer env.Looks.forget(s.Card)
	if err := env.Partitions.SetComputeMode(ctx, s.Card, to); err != nil {
		return s.failed(err)
	}
	return nil
}

func (s *computeMode) failed(err error) error {
	return fmt.Errorf("compute mode of %s: %w", s.GPU, err)
}
