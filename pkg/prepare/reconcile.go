package prepare

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
)

const (
	// reconcileTime bounds the work on one claim's hardware, and the wait for it.
	reconcileTime = 30 * time.Second
	// keepTime bounds how long it is looked at how a claim's devices are shared, while others wait for them: nvidia-smi takes a second or two each time where
	// persistence mode is off, and to set a time slice again it runs four times.
	keepTime = 10 * time.Second
)

// errNotLooked is of a claim whose devices were not looked at. Nothing is known to be wrong with them.
var errNotLooked = errors.New("the claim's devices were not looked at")

// round is one comparison of all claims: what several of them share is looked at once. A nil round remembers nothing.
type round struct {
	mu   sync.Mutex
	done map[string]error
}

// once does the work for the first who asks for the key, and gives the others its outcome. Those who ask for one key at the same time hold one lock.
func (r *round) once(key string, work func() error) error {
	if r == nil {
		return work()
	}
	r.mu.Lock()
	err, done := r.done[key]
	r.mu.Unlock()
	if done {
		return err
	}
	err = work()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done[key] = err
	return err
}

// forget is called when what was looked at may be another thing by now.
func (r *round) forget() {
	if r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		clear(r.done)
	}
}

// Reconcile brings hardware and records to agree, for every claim that no other call works on. What was not finished, or not given back in whole, is
// reverted. A partition of a prepared claim that is gone is cut again at its place; where that is impossible, the claim's spec is removed, so that its next
// container fails to start and never gets another device, and the error says which device is lost; see [Lost].
//
// How devices are shared is looked at, which the inventory does not see, and set again.
//
// Claims side by side: a GPU that hangs keeps no other waiting. What the inventory sees as it should be is not asked for again.
func (p *Preparer) Reconcile(ctx context.Context) error {
	entries, err := p.Records.List()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	var all together
	r := &round{done: map[string]error{}}
	for _, e := range entries {
		all.do(func() error { return ofClaim(e.ClaimUID, p.reconcileClaim(ctx, r, e.ClaimUID)) })
	}
	all.do(func() error { return ofClaim("", p.orphans(ctx)) })
	all.do(func() error { return ofClaim("", p.forgetModes(ctx)) })
	return all.wait()
}

func (p *Preparer) reconcileClaim(ctx context.Context, all *round, uid types.UID) error {
	waiting, cancel := context.WithTimeout(ctx, recoverWait)
	defer cancel()
	err := errNotLooked // by us: a call works on the claim
	if lockErr := p.unlessBusy(waiting, uid, func(held *lock.Held) error {
		err = p.reconcileLocked(ctx, all, held, uid)
		return nil
	}); lockErr != nil {
		return lockErr
	}
	if errors.Is(err, errNotLooked) {
		p.NotLooked(uid)
		return nil
	}
	return err
}

func (p *Preparer) reconcileLocked(ctx context.Context, all *round, held *lock.Held, uid types.UID) error {
	r, found, err := p.Records.Load(uid)
	var unreadable *checkpoint.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return errNotLooked // Recover has said so; it stays until its claim is given back
	case err != nil:
		return because(CauseRecord, "%w", err)
	case !found:
		return nil
	}
	most := reconcileTime
	if r.State == checkpoint.Prepared {
		err := p.rewrite(ctx, r, p.seen)
		unseen := errors.Is(err, errUnseen)
		if !unseen && !sharesSteps(r) {
			return err
		}
		if !unseen {
			most = keepTime
		}
	}
	// Others may be before it whose GPU takes as long to answer.
	queued, cancelQueued := context.WithTimeout(ctx, reconcileTime)
	defer cancelQueued()
	if err := lockGPUs(queued, held, r.GPUs()...); err != nil {
		return fmt.Errorf("claim %s/%s: %w", r.Namespace, r.Name, err)
	}
	work, cancelWork := context.WithTimeoutCause(ctx, most, fmt.Errorf("it was not done within %s", most))
	defer cancelWork()
	if r.State == checkpoint.Prepared {
		return p.rewrite(work, r, p.heldIn(all))
	}
	klog.FromContext(ctx).Info("Reverting what was not finished or not given back in whole", "claim", klog.KRef(r.Namespace, r.Name), "claimUID", uid, "state", r.State)
	round, cancelRound := context.WithTimeout(work, roundTime+answerTime)
	defer cancelRound()
	if err := p.revert(round, r); err != nil {
		return err
	}
	p.interrupted(ctx, r)
	return nil
}
