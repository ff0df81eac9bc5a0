package steps

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// unreadableError returns the error for a claim that wants to join a shared step whose file cannot
// be read. If the file is damaged, the error says that it is unknown which claims share the step.
func (s *Shared) unreadableError(err error) error {
	var unreadable *statefile.UnreadableError
	if !errors.As(err, &unreadable) {
		return cause.Wrap(cause.Record, err)
	}
	return cause.Errorf(cause.Held, "it is unknown which claims share %s: %w: wait until the last Pod that shares %s has ended on this node",
		s.Key, err, strings.Join(s.GPUs, ", "))
}

// MaintainWithoutHolder restores the effect of the wrapped step for a prepared claim, although the
// file that lists the step's claims is unreadable.
func (s *Shared) MaintainWithoutHolder(ctx context.Context, env *Env) error {
	inner, err := s.wantedStep()
	if err != nil {
		return cause.Wrap(cause.Record, err)
	}
	own := *env
	own.Journal, own.EarlierBoot = func() error { return nil }, false
	return env.Pass.once(s.Key, func() error { return inner.maintain(ctx, &own) })
}

// leaveUnreadable ends the claim's use of a shared step whose file is unreadable. It finds the
// other claims that share the step by their records. If there is none, it resets the hardware to
// its default.
func (s *Shared) leaveUnreadable(ctx context.Context, env *Env, reason error) error {
	others, err := ClaimsSharing(env.Records, s.Key, s.GPUs)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(others, func(uid types.UID) bool { return uid != env.ClaimUID }) {
		return nil
	}
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

// ClaimsSharing returns the claims on the GPUs whose records name the shared setting, partition or
// daemon with this key. Without GPUs it looks at all claims. It includes claims with unreadable
// records, because they may share it too.
func ClaimsSharing(records *checkpoint.Store, key string, gpus []string) ([]types.UID, error) {
	entries, err := records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	isOnAny := func(d string) bool {
		return slices.ContainsFunc(gpus, func(gpu string) bool { return d == gpu || strings.HasPrefix(d, gpu+"-") })
	}
	var uids []types.UID
	for _, e := range entries {
		if len(gpus) > 0 && !e.Inexact && !slices.ContainsFunc(e.Devices, isOnAny) {
			continue
		}
		r, found, err := records.Load(e.ClaimUID)
		if err != nil || found && slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return references(s, key) }) {
			uids = append(uids, e.ClaimUID)
		}
	}
	return uids, nil
}

// references reports whether step, from a claim's record, is a shared setting, partition or daemon
// with this key.
func references(step checkpoint.Step, key string) bool {
	if step.Kind != SharedKind {
		return false
	}
	s := &Shared{}
	return json.Unmarshal(step.Params, s) != nil || s.Key == key
}
