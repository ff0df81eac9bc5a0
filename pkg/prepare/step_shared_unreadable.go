package prepare

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// unreadableError returns the error for a claim that wants to join a shared step whose file cannot
// be read. If the file is damaged, the error says that it is unknown which claims share the step.
func (s *sharedStep) unreadableError(err error) error {
	var unreadable *statefile.UnreadableError
	if !errors.As(err, &unreadable) {
		return withCause(CauseRecord, "%w", err)
	}
	return withCause(CauseHeld, "it is unknown which claims share %s: %w: wait until the last Pod that shares %s has ended on this node",
		s.Key, err, strings.Join(s.GPUs, ", "))
}

// maintainWithoutHolder restores the effect of the wrapped step for a prepared claim, although the
// file that lists the step's claims is unreadable.
func (s *sharedStep) maintainWithoutHolder(ctx context.Context, env *Env) error {
	inner, err := s.wantedStep()
	if err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	own := *env
	own.Journal, own.EarlierBoot = func() error { return nil }, false
	return env.Pass.once(s.Key, func() error { return inner.maintain(ctx, &own) })
}

// leaveUnreadable ends the claim's use of a shared step whose file is unreadable. It finds the
// other claims that share the step by their records. If there is none, it resets the hardware to
// its default.
func (s *sharedStep) leaveUnreadable(ctx context.Context, env *Env, reason error) error {
	others, err := env.ClaimsSharing(s.Key, s.GPUs)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(others, func(uid types.UID) bool { return uid != env.ClaimUID }) {
		return nil
	}
	inner, err := s.wantedStep()
	if err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	inner.assumeDefaults()
	own := *env
	own.Journal, own.EarlierBoot = func() error { return nil }, false
	if err := inner.Revert(ctx, &own); err != nil {
		return err
	}
	place, err := env.Records.QuarantineHolder(s.Key, env.Now())
	if err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	klog.FromContext(ctx).Error(reason, "Quarantined unreadable file of a shared setting; reset the setting to its default",
		"holder", s.Key, "quarantine", place)
	return nil
}
