package steps

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

const SharedKind = "shared"

// Shared wraps a Sharable, such as setting a time slice. The first claim applies the
// wrapped step, and the last one reverts it. A file (see [checkpoint.Holder]) has the common state
// and lists the claims. Callers hold the GPUs' locks.
type Shared struct {
	change
	Key  string   `json:"key"`
	GPUs []string `json:"gpus"`
	// Want is the wrapped step as this claim would apply it if it came first.
	Want checkpoint.Step `json:"want"`

	// step is the step that all claims with this key share, and holder the file that lists the claims,
	// as it was last read. They are not part of the claim's record.
	step   Sharable
	holder checkpoint.Holder
	// fresh means that the step is not applied in this boot: either no claim shares it, or its claims
	// shared it before a reboot.
	fresh bool
}

var _ Creator = &Shared{}

// NewShared wraps a step so that claims can share it. The key consists of the parameter "of",
// which is the name of a GPU, partition or daemon, and the step's kind.
func NewShared(of string, gpus []string, step Sharable) (*Shared, error) {
	stored, err := Encode([]Step{step})
	if err != nil {
		return nil, err
	}
	return &Shared{Key: SharedKey(of, step.Kind()), GPUs: gpus, Want: stored[0], step: step, fresh: true}, nil
}

// SharedKey is the inverse of SplitKey.
func SharedKey(of, kind string) string { return of + "_" + kind }

// SplitKey splits the key of a shared step into the name of the GPU, partition or daemon and the
// kind of the step.
func SplitKey(key string) (of, kind string) {
	of, kind, _ = strings.Cut(key, "_")
	return of, kind
}

func (s *Shared) Kind() string { return SharedKind }

// Partition implements [Creator]. The name has the share suffix.
func (s *Shared) Partition() string {
	of, _ := SplitKey(s.Key)
	name, _ := device.ParseName(of)
	name.Share = true
	return name.String()
}

// MIG implements [Creator].
func (s *Shared) MIG() *MIGInstance {
	m, _ := s.step.(*MIGInstance)
	return m
}

// Load implements [Creator].
func (s *Shared) Load(records *checkpoint.Store, bootID string) error {
	if err := s.load(records, bootID); err != nil {
		return s.unreadableError(err)
	}
	if _, creates := AsCreator(s); creates && s.MIG() == nil {
		return wrongKindError(s.Key, s.step)
	}
	return nil
}

func wrongKindError(key string, step Sharable) error {
	return cause.Errorf(cause.Record,
		"the file of shared MIG instance %s has a step of kind %s instead: delete the Pods that share the device", key, step.Kind())
}

// Recreate implements [Creator]. It also saves the new partition in the file of the shared step.
func (s *Shared) Recreate(ctx context.Context, env *Env, ready func(*MIGInstance) error) error {
	s.holder.State = checkpoint.Applying
	if err := s.MIG().Recreate(ctx, s.stepEnv(env), ready); err != nil {
		return err
	}
	s.holder.State = checkpoint.Applied
	return s.save(env)
}

// Wants reports whether both steps are the same shared setting, partition or daemon with the same
// value. It compares descriptions, because versions of the driver may encode the same value
// differently.
func (s *Shared) Wants(other *Shared) bool {
	x, err := s.wantedStep()
	y, errY := other.wantedStep()
	return err == nil && errY == nil && s.Key == other.Key && x.describe() == y.describe()
}

func (s *Shared) wantedStep() (Sharable, error) { return decodeSharable(s.Want) }

// load reads from the file what the claims that share the step have in common. If there is no file
// of this boot, load makes a fresh state with the step as this claim wants it.
func (s *Shared) load(records *checkpoint.Store, bootID string) error {
	s.step, s.holder, s.fresh = nil, checkpoint.Holder{}, false
	h, found, err := records.Holder(s.Key)
	if err != nil {
		return err
	}
	if !found || h.BootID != bootID {
		s.fresh, s.holder = true, checkpoint.Holder{Key: s.Key, GPUs: s.GPUs, State: checkpoint.Applying, BootID: bootID}
		s.step, err = s.wantedStep()
		return err
	}
	s.holder = h
	s.step, err = StepOf(h)
	return err
}

// Apply adds the claim to those that share the step. It applies the wrapped step if this is the
// first claim, and otherwise makes sure that it is still in effect.
func (s *Shared) Apply(ctx context.Context, env *Env) error {
	if err := s.Load(env.Records, env.BootID); err != nil {
		return err
	}
	if err := s.agree(ctx, env); err != nil {
		return err
	}
	joined := !s.holder.HeldBy(env.ClaimUID)
	if joined {
		s.holder.Claims = append(s.holder.Claims,
			checkpoint.HolderClaim{UID: env.ClaimUID, Namespace: env.Namespace, Name: env.Name})
	}
	if joined && s.isApplied() {
		if err := s.save(env); err != nil {
			return err
		}
	}
	return env.Pass.once(s.Key, func() error { return s.applyOrMaintain(ctx, env) })
}

// agree returns an error if this claim wants another value than the claims that already share the
// step. If no other claim shares it, agree reverts the old value, so that the new one can be
// applied.
func (s *Shared) agree(ctx context.Context, env *Env) error {
	want, err := s.wantedStep()
	if err != nil || s.fresh || want.describe() == s.step.describe() {
		return err
	}
	if others := s.holder.Others(env.ClaimUID); len(others) > 0 {
		return cause.Errorf(cause.Held, "the claim wants %s, but %s is set for %s: ask for the same, or wait until the last Pod of every such "+
			"claim has ended on this node",
			want.describe(), s.step.describe(), listClaims(others))
	}
	if err := s.step.Revert(ctx, s.stepEnv(env)); err != nil {
		return err
	}
	s.step, s.holder.Step, s.fresh = want, checkpoint.Step{}, true
	return nil
}

func (s *Shared) isApplied() bool { return !s.fresh && s.holder.State == checkpoint.Applied }

// applyOrMaintain calls maintain of the wrapped step if the step is already applied, and Apply
// otherwise.
func (s *Shared) applyOrMaintain(ctx context.Context, env *Env) error {
	own := s.stepEnv(env)
	if s.isApplied() {
		return s.step.maintain(ctx, own)
	}
	if !s.fresh { // an earlier call was interrupted: revert its changes first
		if err := s.step.Revert(ctx, own); err != nil {
			return err
		}
	}
	s.holder.State = checkpoint.Applying
	if err := s.step.Apply(ctx, own); err != nil {
		return err
	}
	s.holder.State = checkpoint.Applied
	return s.save(env)
}

// stepEnv returns the environment in which the wrapped step runs. Its Journal saves the shared file
// instead of the claim's record.
func (s *Shared) stepEnv(env *Env) *Env {
	own := *env
	own.EarlierBoot = false
	own.Journal = func() error { return s.save(env) }
	return &own
}

func (s *Shared) save(env *Env) error {
	stored, err := Encode([]Step{s.step})
	if err == nil {
		s.holder.Step = stored[0]
		err = env.Records.SaveHolder(s.holder)
	}
	return cause.Wrap(cause.Record, err)
}

// Revert removes the claim from those that share the step. If no other claim is left, Revert also
// reverts the wrapped step.
func (s *Shared) Revert(ctx context.Context, env *Env) error {
	h, found, err := env.Records.Holder(s.Key)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return s.leaveUnreadable(ctx, env, unreadable)
	case err != nil:
		return cause.Wrap(cause.Record, err)
	case !found:
		return s.RemoveHolder(env) // an earlier call may have been killed during the removal
	}
	others := h.Others(env.ClaimUID)
	// Save the file even if the claim is no longer in it. An earlier call may have removed the claim
	// and been killed before the change was durable.
	if len(others) > 0 || !h.HeldBy(env.ClaimUID) {
		h.Claims = others
		return cause.Wrap(cause.Record, env.Records.SaveHolder(h))
	}
	if h.BootID == env.BootID {
		if err := s.Undo(ctx, env); err != nil {
			return s.leaveUndone(ctx, env, err)
		}
	}
	return s.RemoveHolder(env)
}

// leaveUndone gets the error of reverting the step for its last claim. If the step is a
// preference, leaveUndone saves that it was not reverted and returns nil: the GPU stays usable, and
// Reconcile tries again. It returns every other error, so that the claim stays.
func (s *Shared) leaveUndone(ctx context.Context, env *Env, err error) error {
	if s.step == nil || !s.step.preference() {
		return err
	}
	s.holder.Claims = nil
	if serr := s.save(env); serr != nil {
		return errors.Join(err, serr)
	}
	klog.FromContext(ctx).Error(err,
		"Failed to restore the original value of a shared GPU setting; retrying, and the GPU stays usable", "holder", s.Key)
	return nil
}

// Undo reverts the wrapped step for the last claim. If Undo cannot save the state Undoing, for
// example on a full disk, it reverts anyway, because Revert can be repeated.
func (s *Shared) Undo(ctx context.Context, env *Env) error {
	if err := s.load(env.Records, env.BootID); err != nil {
		return cause.Wrap(cause.Record, err)
	}
	if s.holder.State != checkpoint.Undoing {
		s.holder.State = checkpoint.Undoing
		if err := s.save(env); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to record that a GPU setting shared by claims is being reverted; reverting anyway",
				"holder", s.Key)
		}
	}
	return s.step.Revert(ctx, s.stepEnv(env))
}

// RemoveHolder removes the file that lists the claims.
func (s *Shared) RemoveHolder(env *Env) error {
	return cause.Wrap(cause.Record, env.Records.RemoveHolder(s.Key))
}

func listClaims(claims []checkpoint.HolderClaim) string {
	names := make([]string, len(claims))
	for i, c := range claims {
		names[i] = "claim " + c.String()
	}
	return strings.Join(names, ", ")
}

// JoinInstance returns the step that creates the shared partition called name, with the state that
// the claims share which use it already. It returns nil if no claim of this boot shares it.
func JoinInstance(records *checkpoint.Store, bootID string, name device.Name, card device.Card, minor int) (*Shared, error) {
	s := &Shared{Key: PartitionKey(name), GPUs: []string{name.GPU}}
	h, found, err := records.Holder(s.Key)
	if err != nil {
		return nil, s.unreadableError(err)
	}
	if !found || h.BootID != bootID {
		return nil, nil
	}
	m, err := InstanceOf(h)
	if err != nil {
		return nil, err
	}
	m.assumeDefaults()
	m.Card, m.Minor = card, minor
	return NewShared(name.Unshared().String(), s.GPUs, m)
}

// PartitionKey returns the key of the step that creates the shared partition called name.
func PartitionKey(name device.Name) string {
	return SharedKey(name.Unshared().String(), MIGInstanceKind)
}

// StepOf returns the step in a holder file.
func StepOf(h checkpoint.Holder) (Sharable, error) {
	step, err := decodeSharable(h.Step)
	if err != nil {
		return nil, cause.Errorf(cause.Record, "file of shared setting %s: %w", h.Key, err)
	}
	return step, nil
}

// InstanceOf returns the step in the holder file of a shared partition.
func InstanceOf(h checkpoint.Holder) (*MIGInstance, error) {
	step, err := StepOf(h)
	if err != nil {
		return nil, err
	}
	m, ok := step.(*MIGInstance)
	if !ok {
		return nil, wrongKindError(h.Key, step)
	}
	return m, nil
}

// HasShared reports whether the record names a setting, MPS daemon or partition that the claim
// may share with other claims.
func HasShared(r checkpoint.Record) bool {
	return slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return s.Kind == SharedKind })
}
