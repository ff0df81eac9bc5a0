package prepare

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// setting is what steps know that change one of a GPU's settings.
type setting[T comparable] struct {
	GPU  string      `json:"gpu"`
	Card device.Card `json:"card"`
	// Found is what it was before. It is nil while nothing was changed.
	Found *T `json:"found,omitempty"`
}

// knob is one of the settings that GPUs have: what it is called, and how it is read and set.
type knob[T comparable] struct {
	name string
	now  func(ctx context.Context, env *Env, card device.Card) (T, error)
	set  func(ctx context.Context, env *Env, card device.Card, to T) error
	// say is a value in the words of users.
	say func(T) string
}

// apply writes down what is found before anything is changed.
func (k knob[T]) apply(ctx context.Context, env *Env, s *setting[T], want T) error {
	found, err := k.now(ctx, env, s.Card)
	if err != nil {
		return k.failed(s, err)
	}
	s.Found = &found
	if err := env.Journal(); err != nil {
		return err
	}
	env.mayBeForgotten(ctx, s.Card, s.GPU, k.name)
	return k.to(ctx, env, s, want)
}

// keep makes sure that it still is what is wanted.
func (k knob[T]) keep(ctx context.Context, env *Env, s *setting[T], want T) error {
	now, err := k.now(ctx, env, s.Card)
	if err != nil {
		return k.failed(s, err)
	}
	if now == want {
		return nil
	}
	klog.FromContext(ctx).Info("Setting again what is not as the claims of a GPU need it", "gpu", s.GPU, "setting", k.name, "now", k.say(now), "want", k.say(want))
	return k.to(ctx, env, s, want)
}

// revert sets what was found. A setting that is gone with the driver or the card needs nothing.
func (k knob[T]) revert(ctx context.Context, env *Env, s *setting[T]) error {
	if s.Found == nil {
		return nil
	}
	if err := k.to(ctx, env, s, *s.Found); err != nil && !env.isUnset(ctx, s.Card, s.GPU, err) {
		return err
	}
	s.Found = nil
	return nil
}

func (k knob[T]) to(ctx context.Context, env *Env, s *setting[T], to T) error {
	if err := k.set(ctx, env, s.Card, to); err != nil {
		return k.failed(s, err)
	}
	return nil
}

func (k knob[T]) failed(s *setting[T], err error) error {
	return fmt.Errorf("%s of %s: %w", k.name, s.GPU, err)
}
