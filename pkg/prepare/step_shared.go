package prepare

import (
	"context"
	"errors"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const sharedKind = "shared"

// sharable is a step that several claims can hold together. Its Apply calls the journal before it does anything that Revert would have to undo.
type sharable interface {
	Step
	// keep makes sure, while claims hold the step, that what Apply did still holds, and disturbs nobody who uses it.
	keep(ctx context.Context, env *Env) error
	// wanted is what those who hold it together must agree on, in words.
	wanted() string
	// unknown prepares a Revert without the knowledge of what was found and made.
	unknown()
}

// shared is a step that is applied for the first claim that wants it and reverted for the last. What is held is in the holder's file; the claim's record
// has what the claim wants. The caller holds the locks of the GPUs.
type shared struct {
	Key  string   `json:"key"`
	GPUs []string `json:"gpus"`
	// Want is the step as the claim would apply it, were it the first.
	Want checkpoint.Step `json:"want"`

	// held is the step as it was last seen to be held.
	held common
}

var _ Step = &shared{}

// common is a step as claims hold it, and their file.
type common struct {
	step   sharable
	holder checkpoint.Holder
	// fresh says that nothing is applied: nobody holds the step, or nobody has since the node was started.
	fresh bool
}

// share makes a step one that claims can hold together. What is the same for all that do names it.
func share(of string, gpus []string, step sharable) (*shared, error) {
	stored, err := storeOne(step)
	return &shared{Key: sharedKey(of, step.Kind()), GPUs: gpus, Want: stored, held: common{step: step, fresh: true}}, err
}

func sharedKey(of, kind string) string { return of + "_" + kind }

// keyOf takes a key apart.
func keyOf(key string) (of, kind string) {
	of, kind, _ = strings.Cut(key, "_")
	return of, kind
}

func (s *shared) Kind() string { return sharedKind }

// part is the device of which there are shares, as it is allocated, if the step makes it.
func (s *shared) part() (deviceName string, is bool) {
	of, kind := keyOf(s.Key)
	name, known := device.ParseName(of)
	name.Share = true
	return name.String(), known && kind == migInstanceKind
}

// want is the step as the claim wants it.
func (s *shared) want() (sharable, error) { return sharableOf(s.Want) }

// sharableKinds knows every step that a holder can have. Like those of records, kinds are never removed.
var sharableKinds = map[string]func() sharable{
	migInstanceKind: func() sharable { return &migInstance{} },
	timeSliceKind:   func() sharable { return &timeSlice{} },
	computeModeKind: func() sharable { return &computeMode{} },
	mpsDaemonKind:   func() sharable { return &mpsDaemon{} },
}

func sharableOf(stored checkpoint.Step) (sharable, error) { return restoreOne(sharableKinds, stored) }

// load reads what is held. Where nobody holds the step it is as the claim wants it.
func (s *shared) load(records *checkpoint.Store, bootID string) (common, error) {
	h, found, err := records.Holder(s.Key)
	if err != nil {
		return common{}, err
	}
	if !found || h.BootID != bootID {
		step, err := s.want()
		return common{step, checkpoint.Holder{Key: s.Key, GPUs: s.GPUs, State: checkpoint.Applying, BootID: bootID}, true}, err
	}
	step, err := sharableOf(h.Step)
	return common{step: step, holder: h}, err
}

// Apply joins those who hold the step, or is the first.
func (s *shared) Apply(ctx context.Context, env *Env) (err error) {
	if s.held, err = s.load(env.Records, env.BootID); err != nil {
		return s.unreadable(err)
	}
	held := &s.held
	if err := s.agree(ctx, env, held); err != nil {
		return err
	}
	joined := !held.holder.Holds(env.ClaimUID)
	if joined {
		held.holder.Claims = append(held.holder.Claims, checkpoint.HolderClaim{UID: env.ClaimUID, Namespace: env.Namespace, Name: env.Name})
	}
	if joined && held.applied() {
		if err := held.save(env); err != nil {
			return err
		}
	}
	return env.Round.once(s.Key, func() error { return held.hold(ctx, env) })
}

// agree makes sure that the claim wants what is held. Where it is the only one that holds it, and wants something else, nothing is held afterwards.
func (s *shared) agree(ctx context.Context, env *Env, held *common) error {
	want, err := s.want()
	if err != nil || held.fresh || want.wanted() == held.step.wanted() {
		return err
	}
	if others := held.holder.Others(env.ClaimUID); len(others) > 0 {
		return because(CauseHeld, "the claim wants %s, and %s is held for %s: ask for the same, or wait until the last Pod of every such claim has ended on this node",
			want.wanted(), held.step.wanted(), listClaims(others))
	}
	if err := held.step.Revert(ctx, held.own(env)); err != nil {
		return err
	}
	held.step, held.holder.Step, held.fresh = want, checkpoint.Step{}, true
	return nil
}

func (c *common) applied() bool { return !c.fresh && c.holder.State == checkpoint.Applied }

// hold does what the claims that hold the step need.
func (c *common) hold(ctx context.Context, env *Env) error {
	own := c.own(env)
	if c.applied() {
		return c.step.keep(ctx, own)
	}
	if !c.fresh { // What was interrupted is brought back to what was found before it is done again.
		if err := c.step.Revert(ctx, own); err != nil {
			return err
		}
	}
	c.holder.State = checkpoint.Applying
	if err := c.step.Apply(ctx, own); err != nil {
		return err
	}
	c.holder.State = checkpoint.Applied
	return c.save(env)
}

// own is what the step itself works on: its journal is the holder's file.
func (c *common) own(env *Env) *Env {
	own := *env
	own.Forgotten = false
	own.Journal = func() error { return c.save(env) }
	return &own
}

func (c *common) save(env *Env) error {
	stored, err := storeOver(c.holder.Step, c.step)
	if err == nil {
		c.holder.Step = stored
		err = env.Records.SaveHolder(c.holder)
	}
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	return nil
}

// Revert leaves, and is the last if nobody is left.
func (s *shared) Revert(ctx context.Context, env *Env) error {
	h, found, err := env.Records.Holder(s.Key)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return s.abandon(ctx, env, unreadable)
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		return s.removed(env) // also where an earlier call was killed within the removal
	}
	others := h.Others(env.ClaimUID)
	// Also where it has left already: the call that wrote that may have been killed before the disk had it.
	if len(others) > 0 || !h.Holds(env.ClaimUID) {
		h.Claims = others
		if err := env.Records.SaveHolder(h); err != nil {
			return because(CauseRecord, "%w", err)
		}
		return nil
	}
	if h.BootID == env.BootID {
		if err := s.undo(ctx, env); err != nil {
			return s.leaveUndone(ctx, env, err)
		}
	}
	return s.removed(env)
}

// leaveUndone lets the last claim go where all that is left of it is a preference, which harms nobody: it is set back later. What keeps others from the
// device keeps the claim.
func (s *shared) leaveUndone(ctx context.Context, env *Env, err error) error {
	if _, preference := s.held.step.(*timeSlice); !preference {
		return err
	}
	s.held.holder.Claims = nil
	if serr := s.held.save(env); serr != nil {
		return errors.Join(err, serr)
	}
	klog.FromContext(ctx).Error(err, "Could not set back what claims shared; it is tried again, and keeps nobody from the GPU", "holder", s.Key)
	return nil
}

// undo reverts the step for the last claim. A disk that is full keeps nobody from that: reverting twice is reverting once.
func (s *shared) undo(ctx context.Context, env *Env) (err error) {
	if s.held, err = s.load(env.Records, env.BootID); err != nil {
		return because(CauseRecord, "%w", err)
	}
	if s.held.holder.State != checkpoint.Undoing {
		s.held.holder.State = checkpoint.Undoing
		if err := s.held.save(env); err != nil {
			klog.FromContext(ctx).Error(err, "Could not note that what claims shared is being reverted", "holder", s.Key)
		}
	}
	return s.held.step.Revert(ctx, s.held.own(env))
}

func (s *shared) removed(env *Env) error {
	if err := env.Records.RemoveHolder(s.Key); err != nil {
		return because(CauseRecord, "%w", err)
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

// sharedSteps are those of the steps that are held together with other claims, or might be.
func sharedSteps(steps []Step) []*shared {
	var found []*shared
	for _, step := range steps {
		if s, ok := step.(*shared); ok {
			found = append(found, s)
		}
	}
	return found
}
