package prepare

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// settingState is what the claim's record or the shared setting's file stores about a change of a
// GPU setting.
type settingState[T comparable] struct {
	GPU  string      `json:"gpu"`
	Card device.Card `json:"card"`
	// Found is the value that the setting had before the step changed it. It is nil if the step has
	// changed nothing.
	Found *T `json:"found,omitempty"`
}

// gpuSetting says how to read and write a GPU setting.
type gpuSetting[T comparable] struct {
	name string
	read func(ctx context.Context, env *Env, card device.Card) (T, error)
	set  func(ctx context.Context, env *Env, card device.Card, to T) error
	// format returns the name that users know for a value of the setting.
	format func(T) string
}

// apply records the setting's current value and then sets the setting to the parameter want.
func (g gpuSetting[T]) apply(ctx context.Context, env *Env, s *settingState[T], want T) error {
	found, err := g.read(ctx, env, s.Card)
	if err != nil {
		return g.wrapError(s, err)
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	env.mayBeForgotten(ctx, s.Card, s.GPU, g.name)
	return g.write(ctx, env, s, want)
}

// maintain sets the setting to want again if it has another value.
func (g gpuSetting[T]) maintain(ctx context.Context, env *Env, s *settingState[T], want T) error {
	now, err := g.read(ctx, env, s.Card)
	if err != nil {
		return g.wrapError(s, err)
	}
	if now == want {
		return nil
	}
	klog.FromContext(ctx).Info("Restoring a GPU setting that claims need", "gpu", s.GPU, "setting", g.name, "now", g.format(now), "want",
		g.format(want))
	return g.write(ctx, env, s, want)
}

// revert restores the value that the setting had before apply. If the GPU or the NVIDIA driver is
// gone, the setting is gone too, and revert succeeds.
func (g gpuSetting[T]) revert(ctx context.Context, env *Env, s *settingState[T]) error {
	if s.Found == nil {
		return nil
	}
	if err := g.write(ctx, env, s, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

func (g gpuSetting[T]) write(ctx context.Context, env *Env, s *settingState[T], to T) error {
	if err := g.set(ctx, env, s.Card, to); err != nil {
		return g.wrapError(s, err)
	}
	return nil
}

func (g gpuSetting[T]) wrapError(s *settingState[T], err error) error {
	return fmt.Errorf("%s of %s: %w", g.name, s.GPU, err)
}
