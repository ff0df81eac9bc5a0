package steps

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// Step is one reversible part of a preparation. Revert may be called again, and also if Apply never
// ran or ran in part. Apply is called again only after Revert, except that of [Passthrough] and
// [ClaimSpec], which repairs a kept preparation.
type Step interface {
	Kind() string
	Apply(ctx context.Context, env *Env) error
	Revert(ctx context.Context, env *Env) error
	// NeedsHardware reports whether Revert may need the hardware or an MPS daemon.
	NeedsHardware() bool
}

// Sharable is a step that several claims can share, such as a time slice or an MPS daemon. Before
// its Apply changes anything that Revert must restore, Apply calls the Journal of its Env.
type Sharable interface {
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
	// reset restores the hardware's default. The step is empty. The parameter "of" names the GPU,
	// partition or daemon that the step's key names.
	reset(ctx context.Context, env *Env, of string) error
	// preference reports whether the last claim may end although its Revert failed. Reconcile then
	// reverts the step later.
	preference() bool
}

// change has what all steps have in common that change hardware or MPS daemons.
type change struct{}

func (change) NeedsHardware() bool { return true }
func (change) preference() bool    { return false }

// Node is what the steps of all claims work on: the node's hardware and the stores on its disk.
type Node struct {
	BootID  string
	Now     func() time.Time
	Records *checkpoint.Store
	Specs   Specs
	// Hardware has the inventory, which may be out of date.
	Hardware   Hardware
	Partitions Partitions
	Binder     Binder
	MPS        Daemons
}

// Env is what the steps of one claim need to run, in one call.
type Env struct {
	Node
	ClaimUID        types.UID
	Namespace, Name string
	// Steps are the claim's steps. Journal saves their current state in the claim's record. While a
	// shared step runs, Journal saves the state of that step in its own file instead.
	Steps   []Step
	Journal func() error
	// EarlierBoot means that the record was written in an earlier boot, so that its partitions no
	// longer exist.
	EarlierBoot bool
	// UUID returns the UUID of the claim's device with this name.
	UUID func(device string) (string, error)
	// Pass is the Reconcile pass in which the steps run. It is nil outside Reconcile.
	Pass *Pass
	// cards has the state of the cards that this call has read from the hardware.
	cards map[device.Card]device.CardState
}

// NewEnv returns the environment in which steps of record r run, under the locks of the claim's
// GPUs.
func NewEnv(node Node, r *checkpoint.Record, list []Step) *Env {
	env := &Env{
		Node: node, ClaimUID: r.ClaimUID, Namespace: r.Namespace, Name: r.Name, Steps: list,
		EarlierBoot: r.BootID != node.BootID, cards: map[device.Card]device.CardState{},
	}
	env.Journal = func() error {
		stored, err := Encode(env.Steps)
		if err == nil {
			r.Steps = stored
			err = node.Records.Save(*r)
		}
		return cause.Wrap(cause.Record, err)
	}
	return env
}

// Encode encodes the steps for the claim's record.
func Encode(list []Step) ([]checkpoint.Step, error) {
	stored := make([]checkpoint.Step, len(list))
	for i, s := range list {
		params, err := json.Marshal(s)
		if err != nil {
			return nil, fmt.Errorf("store step %s: %w", s.Kind(), err)
		}
		stored[i] = checkpoint.Step{Kind: s.Kind(), Params: params}
	}
	return stored, nil
}

// CardState returns the card's state. It reads the hardware only once, until forgetCard is called.
func (e *Env) CardState(ctx context.Context, card device.Card) (device.CardState, error) {
	if state, ok := e.cards[card]; ok {
		return state, nil
	}
	state, err := e.Partitions.Look(ctx, card)
	if err == nil {
		e.cards[card] = state
	}
	return state, err
}

// forgetCard must be called by a step that changed the card, or may have changed it.
func (e *Env) forgetCard(card device.Card) { delete(e.cards, card) }

// Of returns those of the steps that have the type S.
func Of[S Step](list []Step) []S {
	var found []S
	for _, step := range list {
		if s, ok := step.(S); ok {
			found = append(found, s)
		}
	}
	return found
}

// NeedsHardware reports whether reverting the steps may need the hardware or an MPS daemon.
func NeedsHardware(list []Step) bool { return slices.ContainsFunc(list, Step.NeedsHardware) }

// ApplyAll applies the steps in order.
func ApplyAll[S Step](ctx context.Context, env *Env, list []S) error {
	for _, s := range list {
		if err := s.Apply(ctx, env); err != nil {
			return fmt.Errorf("apply step %s: %w", s.Kind(), err)
		}
	}
	return nil
}

// RevertAll reverts the steps in reverse order.
func RevertAll(ctx context.Context, env *Env, list []Step) error {
	for i := len(list) - 1; i >= 0; i-- {
		if err := list[i].Revert(ctx, env); err != nil {
			return fmt.Errorf("revert step %s: %w", list[i].Kind(), err)
		}
	}
	return nil
}

const (
	// CallTime limits the time that Prepare works on the hardware, however long the kubelet waits.
	CallTime = 40 * time.Second
	// AnswerTime is the part of the kubelet's timeout that is left to report an error.
	AnswerTime = 2 * time.Second
	// UndoTime is the part of the kubelet's timeout that is kept free to undo a failed Prepare.
	UndoTime = 8 * time.Second
	// DestroyTime is the longest time that one call waits until no process uses the MIG instances that
	// it must remove. Other claims on the GPU wait too.
	DestroyTime = 20 * time.Second
	// ScanTime is the longest wait for a scan after virtual machines gave GPUs back.
	ScanTime = 10 * time.Second
	// PeriodicTime limits how long Reconcile and other periodic work keep a GPU locked to remove MIG
	// instances or stop daemons that may be in use. The next pass retries soon.
	PeriodicTime = 5 * time.Second
)

// WithTimeout returns a context for work on the hardware. It ends after the duration "most", or
// earlier if the caller's deadline minus "reserve" comes first.
func WithTimeout(ctx context.Context, most, reserve time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(deadline)-reserve)
	}
	return context.WithTimeoutCause(ctx, most, fmt.Errorf("not done within %s", most.Round(time.Second)))
}
