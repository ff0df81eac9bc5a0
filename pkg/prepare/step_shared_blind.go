package prepare

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// unreadable refuses what nobody can say who holds it, and how it was before.
func (s *shared) unreadable(err error) error {
	var unreadable *checkpoint.UnreadableError
	if !errors.As(err, &unreadable) {
		return because(CauseRecord, "%w", err)
	}
	return because(CauseHeld, "it cannot be told who holds %s: %w: it is free again when the last Pod that shares %s has ended on this node",
		s.Key, err, strings.Join(s.GPUs, ", "))
}

// keepBlind makes sure of what a claim that is prepared was promised, without the file that says who holds it.
func (s *shared) keepBlind(ctx context.Context, env *Env) error {
	inner, err := s.want()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	own := *env
	own.Journal, own.Forgotten = func() error { return nil }, false
	return env.Round.once(s.Key, func() error { return inner.keep(ctx, &own) })
}

// abandon leaves a step whose file cannot be read. Who else holds it is in the claims' records; the last brings the hardware to what it is by default.
func (s *shared) abandon(ctx context.Context, env *Env, reason error) error {
	others, err := env.Sharers(s.Key, s.GPUs)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(others, func(uid types.UID) bool { return uid != env.ClaimUID }) {
		return nil
	}
	inner, err := s.want()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	inner.unknown()
	own := *env
	own.Journal, own.Forgotten = func() error { return nil }, false
	if err := inner.Revert(ctx, &own); err != nil {
		return err
	}
	place, err := env.Records.QuarantineHolder(s.Key, env.Now())
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	klog.FromContext(ctx).Error(reason, "Set a file aside that said what claims shared; the hardware was set to its default, because what was found before cannot be told",
		"holder", s.Key, "quarantine", place)
	return nil
}
