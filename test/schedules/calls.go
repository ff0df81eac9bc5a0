package schedules

import (
	"context"
	"maps"
	"slices"
)

// readyProcess returns a random plugin instance that the kubelet may call, or nil.
func (s *schedule) readyProcess() *process {
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

// call starts a goroutine in which the kubelet calls plugin instance p about claim c. The function
// in parameter do makes the call. The function in parameter then runs afterwards, unless the
// instance died or the kubelet stopped waiting.
func (s *schedule) call(c *claim, p *process, what string, do func(ctx context.Context, k *call) error, then func(k *call, err error)) {
	k := &call{claim: c, process: p, what: what, object: c.now.DeepCopy(), disturbed: s.disturbances(), unprepares: c.unprepares}
	ctx, cancel := context.WithTimeout(context.WithValue(p.ctx, callKey{}, k), kubeletTimeout)
	k.cancel = cancel
	c.calls = append(c.calls, k)
	maps.DeleteFunc(s.shared, func(path string, _ []string) bool { return c.isAbout(path) })
	p.running++
	s.trace = append(s.trace, entry{process: p.id, what: what + " " + c.name})
	s.background(func() func() {
		err := do(ctx, k)
		if err == nil && !p.dead.Load() {
			s.checkSuccess(k)
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

// checkSuccess adds a violation if call k has just succeeded, but what Prepare or Unprepare
// promises does not hold. If the kubelet no longer waits for a Prepare, that must not prepare a
// claim that was unprepared since and that no Pod has reserved.
func (s *schedule) checkSuccess(k *call) {
	switch {
	case k.what == "Prepare" && k.abandoned:
		if k.unprepares != k.claim.unprepares && !k.claim.isReserved() {
			s.violates("a late call prepared claim %s, which was unprepared and which no Pod may use", k.claim.name)
		}
	case k.abandoned:
	case k.what == "Prepare":
		s.checkPrepared(k)
	default:
		s.checkUnprepared(k.claim.uid)
		k.claim.unprepares++
		k.claim.release(k.claim.uid)
	}
}

// outcome says how call k ended. When a process dies, its waiting calls end in any order and with
// any error, so the trace has none of these errors.
func outcome(err error, p *process, k *call) string {
	if p.dead.Load() {
		return "ended with its process"
	}
	text := "done"
	if err != nil {
		text = err.Error()
	}
	if k.abandoned {
		text += " (the kubelet does not get the answer)"
	}
	return text
}

// prepare starts a Prepare call of the kubelet for claim c.
func (s *schedule) prepare(c *claim) {
	p := s.readyProcess()
	if p == nil || c.now == nil {
		return
	}
	if c.phase != prepared {
		c.phase = wanted
	}
	s.call(c, p, "Prepare", func(ctx context.Context, k *call) error {
		if err := p.delayCall(ctx); err != nil {
			return err
		}
		_, err := p.Prepare(ctx, k.object)
		return err
	}, func(k *call, err error) {
		if err == nil {
			c.phase, c.got, c.disturbed = prepared, k.object, s.disturbances()
			c.specMayBeGone = k.rebound || !slices.Equal(k.disturbed, s.disturbances())
		}
	})
}

// unprepare starts an Unprepare call of the kubelet for claim c. The kubelet first gives up its
// Prepare calls for the claim. A Prepare call to the same plugin instance may then still run,
// because its cancellation may come late.
func (s *schedule) unprepare(c *claim) {
	p := s.readyProcess()
	if p == nil {
		return
	}
	for _, k := range c.calls {
		k.abandoned = true
		if k.process != p || s.chance(20) {
			k.cancel()
		}
	}
	c.phase = leaving
	s.call(c, p, "Unprepare", func(ctx context.Context, _ *call) error { return p.Unprepare(ctx, c.uid) }, func(_ *call, err error) {
		if err != nil {
			return
		}
		c.phase, c.got = idle, nil
		if s.chance(s.recreatePercent) {
			s.recreate(c)
		}
	})
}

// reconcile starts the plugin's comparison of checkpoint records with the hardware.
func (s *schedule) reconcile() {
	if p := s.readyProcess(); p != nil {
		s.runTask(p, "reconciles", p.Reconcile, func(error) {})
	}
}

// collectGarbage starts the plugin's garbage collection of orphaned claims.
func (s *schedule) collectGarbage() {
	if p := s.readyProcess(); p != nil {
		s.runTask(p, "collects orphaned claims", p.collectClaims, func(error) {})
	}
}

// runTask starts a task that the plugin runs without a call of the kubelet.
func (s *schedule) runTask(p *process, what string, work func(context.Context) error, then func(error)) {
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
