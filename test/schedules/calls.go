package schedules

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// takesCalls is an instance that the kubelet may call.
func (s *schedule) takesCalls() *process {
	var ready []*process
	for _, p := range s.living {
		if p.ready {
			ready = append(ready, p)
		}
	}
	if len(ready) == 0 {
		return nil
	}
	return pick(s.dice, ready)
}

// call makes one of the kubelet's calls.
func (s *schedule) call(c *claim, p *process, what string, do func(ctx context.Context, k *call) error, then func(k *call, err error)) {
	k := &call{claim: c, process: p, what: what, of: c.now.DeepCopy(), before: s.disturbances(), returns: c.returns}
	ctx, cancel := context.WithTimeout(context.WithValue(p.ctx, callKey{}, k), kubelets)
	k.cancel = cancel
	c.calls = append(c.calls, k)
	p.running++
	s.trace = append(s.trace, entry{process: p.id, what: what + " " + c.name})
	s.background(func() func() {
		err := do(ctx, k)
		if err == nil && !p.dead.Load() {
			s.succeeded(k)
		}
		return func() {
			p.running--
			cancel()
			c.calls = slices.DeleteFunc(c.calls, func(other *call) bool { return other == k })
			s.trace = append(s.trace, entry{process: p.id, what: what + " " + c.name + ": " + outcome(err, p, k)})
			if !p.dead.Load() && !k.abandoned {
				then(k, err)
			}
		}
	})
}

// succeeded looks at a call, in the moment in which it did.
func (s *schedule) succeeded(k *call) {
	switch {
	case k.what == "Prepare" && k.abandoned:
		if k.returns != k.claim.returns && !k.claim.isReserved() {
			s.breaks("a late call has prepared claim %s, which was given back, and which no Pod may use", k.claim.name)
		}
	case k.abandoned:
	case k.what == "Prepare":
		s.answered(k)
	default:
		s.gone(k.claim.uid)
		k.claim.returns++
		k.claim.release(k.claim.uid)
	}
}

func outcome(err error, p *process, k *call) string {
	text := "done"
	if err != nil {
		text = err.Error()
	}
	if p.dead.Load() || k.abandoned {
		text += " (nobody hears of it)"
	}
	return text
}

// prepare is the kubelet's call.
func (s *schedule) prepare(c *claim) {
	p := s.takesCalls()
	if p == nil || c.now == nil {
		return
	}
	if c.phase != prepared {
		c.phase = wanted
	}
	s.call(c, p, "Prepare", func(ctx context.Context, k *call) error {
		if err := p.arrives(ctx); err != nil {
			return err
		}
		_, err := p.Prepare(ctx, k.of)
		return err
	}, func(k *call, err error) {
		if err == nil {
			c.phase, c.got, c.before = prepared, k.of, s.disturbances()
			c.unspecified = !slices.Equal(k.before, s.disturbances())
		}
	})
}

// unprepare is the kubelet's call. It waits for no Prepare any more; but one to the same instance may not hear of that.
func (s *schedule) unprepare(c *claim) {
	p := s.takesCalls()
	if p == nil {
		return
	}
	for _, k := range c.calls {
		k.abandoned = true
		if k.process != p || s.chance(50) {
			k.cancel()
		}
	}
	c.phase = leaving
	s.call(c, p, "Unprepare", func(ctx context.Context, _ *call) error { return p.Unprepare(ctx, c.uid) }, func(_ *call, err error) {
		if err != nil {
			return
		}
		c.phase, c.got = idle, nil
		if s.chance(s.renews) {
			s.fresh(c)
		}
	})
}

// compare is the plugin's comparison of all, or a look whether specs are missing.
func (s *schedule) compare() {
	if p := s.takesCalls(); p != nil {
		does := p.Reconcile
		if s.chance(30) {
			does = p.mend
		}
		s.does(p, "compares", does, func(error) {})
	}
}

// mend is the plugin's look whether specs are missing, as package driver does it.
func (p *process) mend(ctx context.Context) error {
	left, err := p.MendSeen(ctx)
	errs := make([]error, len(left))
	var wg sync.WaitGroup
	for i, uid := range left {
		wg.Go(func() { errs[i] = p.MendUnseen(ctx, uid) })
	}
	wg.Wait()
	return errors.Join(err, errors.Join(errs...))
}

// lookForGone is the plugin's look for claims that are gone.
func (s *schedule) lookForGone() {
	if p := s.takesCalls(); p != nil {
		s.does(p, "looks for claims that are gone", p.giveBackGone, func(error) {})
	}
}

// does lets the plugin do something by itself.
func (s *schedule) does(p *process, what string, work func(context.Context) error, then func(error)) {
	p.running++
	s.background(func() func() {
		err := work(p.ctx)
		return func() {
			p.running--
			s.trace = append(s.trace, entry{process: p.id, what: what + ": " + outcome(err, p, &call{})})
			if !p.dead.Load() {
				then(err)
			}
		}
	})
}
