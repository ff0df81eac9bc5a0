package prepare

import (
	"context"
	"errors"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

const sharedKind = "shared"

// sharableStep is a change that several claims can share, such as a time slice or an MPS daemon.
// Before its Apply changes anything that Revert must restore, Apply calls the Journal of its Env.
type sharableStep interface {
	Step
	// maintain makes sure that the effect of the step still exists while claims share the step. It
	// does not disturb running processes.
	maintain(ctx context.Context, env *Env) error
	// describe returns in words what the step does. Claims can share a step only if their descriptions
	// are equal.
	describe() string
	// assumeDefaults makes the next Revert restore the hardware's default. It is for a step whose
	// original state is unknown.
	assumeDefaults()
}

// sharedStep wraps a sharableStep, such as setting a time slice. The first claim applies the
// wrapped step, and the last one reverts it. A file (see [checkpoint.Holder]) has the common state
// and lists the claims. Callers hold the GPUs' locks.
type sharedStep struct {
	Key  string   `json:"key"`
	GPUs []string `json:"gpus"`
	// Want is the wrapped step as this claim would apply it if it came first.
	Want checkpoint.Step `json:"want"`

	// state is the state that all claims with this key share, as it was last read from the file.
	state sharedState
}

var _ Step = &sharedStep{}

// sharedState is what all claims that share a step have in common: the applied step and the list of
// the claims.
type sharedState struct {
	step   sharableStep
	holder checkpoint.Holder
	// fresh means that the step is not applied in this boot: either no claim shares it, or its claims
	// shared it before a reboot.
	fresh bool
}

// newSharedStep wraps a step so that claims can share it. The key consists of the parameter "of",
// which is the name of a GPU, partition or daemon, and the step's kind.
func newSharedStep(of string, gpus []string, step sharableStep) (*sharedStep, error) {
	stored, err := encodeStep(step)
	return &sharedStep{Key: sharedKey(of, step.Kind()), GPUs: gpus, Want: stored, state: sharedState{step: step, fresh: true}}, err
}

func sharedKey(of, kind string) string { return of + "_" + kind }

// keyOf splits the key of a shared step into the name of the GPU, partition or daemon and the kind
// of the step.
func keyOf(key string) (of, kind string) {
	of, kind, _ = strings.Cut(key, "_")
	return of, kind
}

func (s *sharedStep) Kind() string { return sharedKind }

// sharedPartition returns the name under which the partition is allocated, with the share suffix.
// It returns is false if the step does not create a partition.
func (s *sharedStep) sharedPartition() (deviceName string, is bool) {
	of, kind := keyOf(s.Key)
	name, known := device.ParseName(of)
	name.Share = true
	return name.String(), known && kind == migInstanceKind
}

func (s *sharedStep) wantedStep() (sharableStep, error) { return decodeSharable(s.Want) }

// sharableKinds maps each kind of step that claims can share to its constructor. Never remove a
// kind, because recorded steps of that kind could not be reverted.
var sharableKinds = map[string]func() sharableStep{
	migInstanceKind: func() sharableStep { return &migInstance{} },
	timeSliceKind:   func() sharableStep { return &timeSlice{} },
	computeModeKind: func() sharableStep { return &computeMode{} },
	mpsDaemonKind:   func() sharableStep { return &mpsDaemon{} },
}

func decodeSharable(stored checkpoint.Step) (sharableStep, error) {
	return decodeStep(sharableKinds, stored)
}

// load reads from the file what the claims that share the step have in common. If there is no file
// of this boot, load returns a fresh state with the step as this claim wants it.
func (s *sharedStep) load(records *checkpoint.Store, bootID string) (sharedState, error) {
	h, found, err := records.Holder(s.Key)
	if err != nil {
		return sharedState{}, err
	}
	if !found || h.BootID != bootID {
		step, err := s.wantedStep()
		return sharedState{
			step, checkpoint.Holder{Key: s.Key, GPUs: s.GPUs, State: checkpoint.Applying, BootID: bootID}, true,
		}, err
	}
	step, err := decodeSharable(h.Step)
	return sharedState{step: step, holder: h}, err
}

// Apply adds the claim to those that share the step. It applies the wrapped step if this is the
// first claim, and otherwise makes sure that it is still in effect.
func (s *sharedStep) Apply(ctx context.Context, env *Env) (err error) {
	if s.state, err = s.load(env.Records, env.BootID); err != nil {
		return s.unreadableError(err)
	}
	state := &s.state
	if err := s.agree(ctx, env, state); err != nil {
		return err
	}
	joined := !state.holder.HeldBy(env.ClaimUID)
	if joined {
		state.holder.Claims = append(state.holder.Claims,
			checkpoint.HolderClaim{UID: env.ClaimUID, Namespace: env.Namespace, Name: env.Name})
	}
	if joined && state.isApplied() {
		if err := state.save(env); err != nil {
			return err
		}
	}
	return env.Pass.once(s.Key, func() error { return state.applyOrMaintain(ctx, env) })
}

// agree returns an error if this claim wants another value than the claims that already share the
// step. If no other claim shares it, agree reverts the old value, so that the new one can be
// applied.
func (s *sharedStep) agree(ctx context.Context, env *Env, state *sharedState) error {
	want, err := s.wantedStep()
	if err != nil || state.fresh || want.describe() == state.step.describe() {
		return err
	}
	if others := state.holder.Others(env.ClaimUID); len(others) > 0 {
		return withCause(CauseHeld, "the claim wants %s, but %s is set for %s: ask for the same, or wait until the last Pod of every such "+
			"claim has ended on this node",
			want.describe(), state.step.describe(), listClaims(others))
	}
	if err := state.step.Revert(ctx, state.stepEnv(env)); err != nil {
		return err
	}
	state.step, state.holder.Step, state.fresh = want, checkpoint.Step{}, true
	return nil
}

func (s *sharedState) isApplied() bool { return !s.fresh && s.holder.State == checkpoint.Applied }

// applyOrMaintain calls maintain of the wrapped step if the step is already applied, and Apply
// otherwise.
func (s *sharedState) applyOrMaintain(ctx context.Context, env *Env) error {
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
func (s *sharedState) stepEnv(env *Env) *Env {
	own := *env
	own.EarlierBoot = false
	own.Journal = func() error { return s.save(env) }
	return &own
}

func (s *sharedState) save(env *Env) error {
	stored, err := encodeStep(s.step)
	if err == nil {
		s.holder.Step = stored
		err = env.Records.SaveHolder(s.holder)
	}
	if err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	return nil
}

// Revert removes the claim from those that share the step. If no other claim is left, Revert also
// reverts the wrapped step.
func (s *sharedStep) Revert(ctx context.Context, env *Env) error {
	h, found, err := env.Records.Holder(s.Key)
	var unreadable *statefile.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return s.leaveUnreadable(ctx, env, unreadable)
	case err != nil:
		return withCause(CauseRecord, "%w", err)
	case !found:
		return s.removeHolder(env) // an earlier call may have been killed during the removal
	}
	others := h.Others(env.ClaimUID)
	// Save the file even if the claim is no longer in it. An earlier call may have removed the claim
	// and been killed before the change was durable.
	if len(others) > 0 || !h.HeldBy(env.ClaimUID) {
		h.Claims = others
		if err := env.Records.SaveHolder(h); err != nil {
			return withCause(CauseRecord, "%w", err)
		}
		return nil
	}
	if h.BootID == env.BootID {
		if err := s.undo(ctx, env); err != nil {
			return s.leaveUndone(ctx, env, err)
		}
	}
	return s.removeHolder(env)
}

// leaveUndone gets the error of reverting the step for its last claim. If only a time slice could
// not be restored, it saves that and returns nil: the GPU stays usable, and Reconcile tries again.
// It returns every other error, so that the claim stays.
func (s *sharedStep) leaveUndone(ctx context.Context, env *Env, err error) error {
	if _, preference := s.state.step.(*timeSlice); !preference {
		return err
	}
	s.state.holder.Claims = nil
	if serr := s.state.save(env); serr != nil {
		return errors.Join(err, serr)
	}
	klog.FromContext(ctx).Error(err,
		"Failed to restore the original value of a shared GPU setting; retrying, and the GPU stays usable", "holder", s.Key)
	return nil
}

// undo reverts the wrapped step for the last claim. If undo cannot save the state Undoing, for
// example on a full disk, it reverts anyway, because Revert can be repeated.
func (s *sharedStep) undo(ctx context.Context, env *Env) (err error) {
	if s.state, err = s.load(env.Records, env.BootID); err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	if s.state.holder.State != checkpoint.Undoing {
		s.state.holder.State = checkpoint.Undoing
		if err := s.state.save(env); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to record that a GPU setting shared by claims is being reverted; reverting anyway",
				"holder", s.Key)
		}
	}
	return s.state.step.Revert(ctx, s.state.stepEnv(env))
}

func (s *sharedStep) removeHolder(env *Env) error {
	if err := env.Records.RemoveHolder(s.Key); err != nil {
		return withCause(CauseRecord, "%w", err)
	}
	return nil
}

func listClaims(claims []checkpoint.HolderClaim) string {
	names := make([]string, len(claims))
	for i, c := range claims {
		names[i] = "claim " + c.String()
	}
	return strings.Join(names, ", ")
}

// sharedSteps returns those of the steps that are sharedSteps: settings, daemons and partitions
// that claims can share.
func sharedSteps(steps []Step) []*sharedStep {
	var found []*sharedStep
	for _, step := range steps {
		if s, ok := step.(*sharedStep); ok {
			found = append(found, s)
		}
	}
	return found
}
