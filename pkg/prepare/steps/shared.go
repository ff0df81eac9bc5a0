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
// wrapped step, and the last one reverts it: see [ReadSharers]. A file has the common state (see
// [checkpoint.Holder]). A claim's record has the step before Apply, so a claim that ends writes no
// file. Callers hold the GPUs' locks.
type Shared struct {
	change
	Key  string   `json:"key"`
	GPUs []string `json:"gpus"`
	// Want is the wrapped step as this claim would apply it if it came first.
	Want checkpoint.Step `json:"want"`

	// step is the step that all claims with this key share, and holder its file, as it was last read.
	// They are not part of the claim's record.
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

// Apply applies the wrapped step if this is the first claim that shares it, and otherwise makes
// sure that it is still in effect.
func (s *Shared) Apply(ctx context.Context, env *Env) error {
	if err := s.Load(env.Records, env.BootID); err != nil {
		return err
	}
	if err := s.agree(ctx, env); err != nil {
		return err
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
	others, err := s.others(env)
	if err != nil {
		return err
	}
	if len(others) > 0 {
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

// others returns the other claims that share the step.
func (s *Shared) others(env *Env) ([]checkpoint.ClaimRef, error) {
	sharers, err := ReadSharers(env.Records, env.BootID, s.GPUs)
	return slices.DeleteFunc(sharers.Of(s.Key), func(c checkpoint.ClaimRef) bool { return c.UID == env.ClaimUID }), err
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

// Revert reverts the wrapped step, unless another claim shares it.
func (s *Shared) Revert(ctx context.Context, env *Env) error {
	if others, err := s.others(env); err != nil || len(others) > 0 {
		return err
	}
	_, err := s.End(ctx, env)
	return err
}

// End reverts the wrapped step, which no other claim shares, and removes its file. If that fails
// and the step is a preference, End returns false without an error: the GPU stays usable, and
// Reconcile tries again.
func (s *Shared) End(ctx context.Context, env *Env) (ended bool, _ error) {
	h, found, err := env.Records.Holder(s.Key)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return true, s.endUnreadable(ctx, env, unreadable)
	case err != nil:
		return false, cause.Wrap(cause.Record, err)
	case found && h.BootID == env.BootID:
		if err := s.undo(ctx, env); err != nil {
			if s.step == nil || !s.step.preference() {
				return false, err
			}
			klog.FromContext(ctx).Error(err,
				"Failed to restore the original value of a shared GPU setting; retrying, and the GPU stays usable", "holder", s.Key)
			return false, nil
		}
	}
	// Without a file, too: an earlier call may have been killed during the removal.
	return true, cause.Wrap(cause.Record, env.Records.RemoveHolder(s.Key))
}

// undo reverts the wrapped step for the last claim. If undo cannot save the state Undoing, for
// example on a full disk, it reverts anyway, because Revert can be repeated.
func (s *Shared) undo(ctx context.Context, env *Env) error {
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

func listClaims(claims []checkpoint.ClaimRef) string {
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
