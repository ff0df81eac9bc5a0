package steps

import (
	"context"
	"errors"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// unreadableError returns the error for a claim that wants to join a shared step whose file cannot
// be read. If the file is damaged, the error says what ends that.
func (s *Shared) unreadableError(err error) error {
	var unreadable *statefile.UnreadableError
	if !errors.As(err, &unreadable) {
		return cause.Wrap(cause.Record, err)
	}
	return cause.Errorf(cause.Held, "it is unknown how %s was set up: %w: wait until the last Pod that shares %s has ended on this node",
		s.Key, err, strings.Join(s.GPUs, ", "))
}

// MaintainWithoutHolder restores the effect of the wrapped step for a prepared claim, although the
// step's file is unreadable.
func (s *Shared) MaintainWithoutHolder(ctx context.Context, env *Env) error {
	inner, err := s.wantedStep()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	own := *env
	own.Journal, own.EarlierBoot = func() error { return nil }, false
	return env.Pass.once(s.Key, func() error { return inner.maintain(ctx, &own) })
}

// endUnreadable resets the hardware to its default, because the file with the original state of the
// step is unreadable, and moves the file to the quarantine.
func (s *Shared) endUnreadable(ctx context.Context, env *Env, reason error) error {
	inner, err := s.wantedStep()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	inner.assumeDefaults()
	own := *env
	own.Journal, own.EarlierBoot = func() error { return nil }, false
	if err := inner.Revert(ctx, &own); err != nil {
		return err
	}
	place, err := env.Records.QuarantineHolder(s.Key, env.Now())
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	klog.FromContext(ctx).Error(reason, "Quarantined unreadable file of a shared setting; reset the setting to its default",
		"holder", s.Key, "quarantine", place)
	return nil
}
