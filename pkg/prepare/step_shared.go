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

	// inner is the step as it is held, as far as it was loaded; holder its file.
	inner  sharable
	holder checkpoint.Holder
}

var _ Step = &shared{}

// share makes a step one that claims can hold together. What is the same for all that do names it.
func share(of string, gpus []string, step sharable) (*shared, error) {
	stored, err := storeOne(step)
	return &shared{Key: sharedKey(of, step.Kind()), GPUs: gpus, Want: stored, inner: step}, err
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

// load reads what is held. It is false if nobody holds the step, or nobody has since the node was started.
func (s *shared) load(records *checkpoint.Store, bootID string) (held bool, err error) {
	h, found, err := records.Holder(s.Key)
	if err != nil {
		return false, err
	}
	if !found || h.BootID != bootID {
		s.holder = checkpoint.Holder{Key: s.Key, GPUs: s.GPUs, State: checkpoint.Applying, BootID: bootID}
		s.inner, err = s.want()
		return false, err
	}
	s.holder = h
	s.inner, err = sharableOf(h.Step)
	return true, err
}

// Apply joins those who hold the step, or is the first.
func (s *shared) Apply(ctx context.Context, env *Env) error {
	held, err := s.load(env.Records, env.BootID)
	if err != nil {
		return s.unreadable(err)
	}
	if held {
		if held, err = s.agree(ctx, env); err != nil {
			return err
		}
	}
	joined := !s.holder.Holds(env.ClaimUID)
	if joined {
		s.holder.Claims = append(s.holder.Claims, checkpoint.HolderClaim{UID: env.ClaimUID, Namespace: env.Namespace, Name: env.Name})
	}
	if joined && held && s.holder.State == checkpoint.Applied {
		if err := s.save(env); err != nil {
			return err
		}
	}
	return env.Round.once(s.Key, func() error { return s.hold(ctx, env, held) })
}

// hold does what the claims that hold the step need.
func (s *shared) hold(ctx context.Context, env *Env, held bool) error {
	own := s.own(env)
	if held && s.holder.State == checkpoint.Applied {
		return s.inner.keep(ctx, own)
	}
	if held { // What was interrupted is brought back to what was found before it is done again.
		if err := s.inner.Revert(ctx, own); err != nil {
			return err
		}
	}
	s.holder.State = checkpoint.Applying
	if err := s.inner.Apply(ctx, own); err != nil {
		return err
	}
	s.holder.State = checkpoint.Applied
	return s.save(env)
}

// agree makes sure that the claim wants what is held. It is false if nothing is held after all: the claim was the only one, and wants something else.
func (s *shared) agree(ctx context.Context, env *Env) (held bool, err error) {
	want, err := s.want()
	if err != nil || want.wanted() == s.inner.wanted() {
		return err == nil, err
	}
	if others := s.holder.Others(env.ClaimUID); len(others) > 0 {
		return true, because(CauseHeld, "the claim wants %s, and %s is held for %s: ask for the same, or wait until the last Pod of every such claim has ended on this node",
			want.wanted(), s.inner.wanted(), listClaims(others))
	}
	if err := s.inner.Revert(ctx, s.own(env)); err != nil {
		return true, err
	}
	s.inner, s.holder.Step = want, checkpoint.Step{}
	return false, nil
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
	if _, preference := s.inner.(*timeSlice); !preference {
		return err
	}
	s.holder.Claims = nil
	if serr := s.save(env); serr != nil {
		return errors.Join(err, serr)
	}
	klog.FromContext(ctx).Error(err, "Could not set back what claims shared; it is tried again, and keeps nobody from the GPU", "holder", s.Key)
	return nil
}

// undo reverts the step for the last claim. A disk that is full keeps nobody from that: reverting twice is reverting once.
func (s *shared) undo(ctx context.Context, env *Env) error {
	if _, err := s.load(env.Records, env.BootID); err != nil {
		return because(CauseRecord, "%w", err)
	}
	if s.holder.State != checkpoint.Undoing {
		s.holder.State = checkpoint.Undoing
		if err := s.save(env); err != nil {
			klog.FromContext(ctx).Error(err, "Could not note that what claims shared is being reverted", "holder", s.Key)
		}
	}
	return s.inner.Revert(ctx, s.own(env))
}

func (s *shared) removed(env *Env) error {
	if err := env.Records.RemoveHolder(s.Key); err != nil {
		return because(CauseRecord, "%w", err)
	}
	return nil
}

// own is what the step itself works on: its journal is the holder's file.
func (s *shared) own(env *Env) *Env {
	own := *env
	own.Forgotten = false
	own.Journal = func() error { return s.save(env) }
	return &own
}

func (s *shared) save(env *Env) error {
	stored, err := storeOver(s.holder.Step, s.inner)
	if err == nil {
		s.holder.Step = stored
		err = env.Records.SaveHolder(s.holder)
	}
	if err != nil {
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
