package steps

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Setting is the step that changes one setting of a GPU, whose values have the type T.
type Setting[T comparable] struct {
	change
	about *gpuSetting[T]
	GPU   string      `json:"gpu"`
	Card  device.Card `json:"card"`
	// Found is the value that the setting had before the step changed it. It is nil if the step has
	// changed nothing.
	Found *T `json:"found,omitempty"`
	Want  T  `json:"want"`
}

// gpuSetting says what the setting is, and how to read and write it.
type gpuSetting[T comparable] struct {
	kind, name string
	phrase     string // begins the description of a value
	read       func(ctx context.Context, env *Env, card device.Card) (T, error)
	set        func(ctx context.Context, env *Env, card device.Card, to T) error
	// format returns the name that users know for a value of the setting.
	format     func(T) string
	standard   T // the hardware's default
	preference bool
}

func (s *Setting[T]) Kind() string { return s.about.kind }

func (s *Setting[T]) describe() string {
	return fmt.Sprintf("%s %s on %s", s.about.phrase, s.about.format(s.Want), s.GPU)
}

func (s *Setting[T]) assumeDefaults() {
	found := s.about.standard
	s.Found = &found
}

func (s *Setting[T]) preference() bool { return s.about.preference }

// Apply records the setting's current value and then sets the setting.
func (s *Setting[T]) Apply(ctx context.Context, env *Env) error {
	found, err := s.about.read(ctx, env, s.Card)
	if err != nil {
		return s.wrapError(err)
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	return s.write(ctx, env, s.Want)
}

func (s *Setting[T]) maintain(ctx context.Context, env *Env) error {
	now, err := s.about.read(ctx, env, s.Card)
	if err != nil || now == s.Want {
		return s.wrapError(err)
	}
	klog.FromContext(ctx).Info("Restoring a GPU setting that claims need", "gpu", s.GPU, "setting", s.about.name,
		"now", s.about.format(now), "want", s.about.format(s.Want))
	return s.write(ctx, env, s.Want)
}

// Revert restores the value that the setting had before Apply. If the GPU or the NVIDIA driver is
// gone, the setting is gone too, and Revert succeeds.
func (s *Setting[T]) Revert(ctx context.Context, env *Env) error {
	if s.Found == nil {
		return nil
	}
	if err := s.write(ctx, env, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

// reset succeeds if the GPU is gone, because then the setting is gone too.
func (s *Setting[T]) reset(ctx context.Context, env *Env, gpu string) error {
	snapshot := env.Hardware.Snapshot()
	for _, g := range snapshot.Node.GPUs {
		if g.WholeName() == gpu {
			s.GPU, s.Card = gpu, g.Card()
			s.assumeDefaults()
			return s.Revert(ctx, env)
		}
	}
	if snapshot.Known {
		return nil
	}
	return NotReady(snapshot)
}

func (s *Setting[T]) write(ctx context.Context, env *Env, to T) error {
	return s.wrapError(s.about.set(ctx, env, s.Card, to))
}

func (s *Setting[T]) wrapError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of %s: %w", s.about.name, s.GPU, err)
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
