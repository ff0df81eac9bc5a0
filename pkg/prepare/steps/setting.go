package steps

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// SettingState is what the claim's record or the shared setting's file stores about a change of a
// GPU setting.
type SettingState[T comparable] struct {
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
func (g gpuSetting[T]) apply(ctx context.Context, env *Env, s *SettingState[T], want T) error {
	found, err := g.read(ctx, env, s.Card)
	if err != nil {
		return g.wrapError(s, err)
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	return g.write(ctx, env, s, want)
}

// maintain sets the setting to want again if it has another value.
func (g gpuSetting[T]) maintain(ctx context.Context, env *Env, s *SettingState[T], want T) error {
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
func (g gpuSetting[T]) revert(ctx context.Context, env *Env, s *SettingState[T]) error {
	if s.Found == nil {
		return nil
	}
	if err := g.write(ctx, env, s, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

func (g gpuSetting[T]) write(ctx context.Context, env *Env, s *SettingState[T], to T) error {
	if err := g.set(ctx, env, s.Card, to); err != nil {
		return g.wrapError(s, err)
	}
	return nil
}

func (g gpuSetting[T]) wrapError(s *SettingState[T], err error) error {
	return fmt.Errorf("%s of %s: %w", g.name, s.GPU, err)
}

// isUnset reports whether err, from an attempt to restore a GPU setting, means that nothing is left
// to restore: the card or the NVIDIA driver is gone, or the GPU no longer supports the setting.
func (e *Env) isUnset(ctx context.Context, card device.Card, gpu string, err error) bool {
	unset := FailureCode(err) == device.FailureNotSupported || e.isCardGone(card, err)
	if unset {
		klog.FromContext(ctx).Info("Skipped restoring a GPU setting: the GPU is gone, was reset, or does not support it",
			"gpu", gpu, "reason", err.Error())
	}
	return unset
}

// resetSetting resets the setting of the GPU to its default. s is the empty state of the step. If
// the GPU is gone, the setting is gone too.
func resetSetting[T comparable](ctx context.Context, env *Env, gpu string, s *SettingState[T], step Sharable) error {
	snapshot := env.Hardware.Snapshot()
	for _, g := range snapshot.Node.GPUs {
		if g.WholeName() == gpu {
			s.GPU, s.Card = gpu, g.Card()
			step.assumeDefaults()
			return step.Revert(ctx, env)
		}
	}
	if snapshot.Known {
		return nil
	}
	return NotReady(snapshot)
}
