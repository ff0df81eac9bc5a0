package schedules

import (
	"context"
	"path/filepath"
	"slices"
	"time"
)

// act lets something happen besides the plugin.
func (s *schedule) act() {
	if len(s.living) == 0 {
		s.start()
		s.advance(s.IntN(60))
		return
	}
	n := s.IntN(100)
	c := pick(s.dice, s.claims)
	switch {
	case n < 56:
		s.lives(c)
	case n < 66:
		s.compare()
	case n < 70:
		s.scan()
		s.note("the inventory looks")
	case n < 75:
		if len(s.living) < 2 {
			s.start()
		}
	case n < 79:
		s.kill(pick(s.dice, s.living))
	case n < 81:
		s.powerCut()
	case n < 84:
		s.someoneElseCuts(pick(s.dice, s.gpus))
	case n < 87:
		s.someoneRemovesASpec(c)
	case n < 89:
		s.reset(pick(s.dice, s.gpus))
	case n < 91 && s.absent:
		s.note("the MPS supervisor is back")
		s.absent = false
	case n < 93:
		// A late call, which the kubelet has forgotten that it made.
		if c.phase == prepared && len(c.calls) == 0 {
			s.prepare(c)
			s.prepare(c)
		}
	case n < 94:
		s.rots()
	case n < 95:
		s.pass(time.Duration(s.IntN(100)) * time.Second)
	default:
		s.forget(c)
	}
}

// someoneElseCuts is an admin, who turns on no MIG mode while claims are about. A Prepare of a whole GPU goes by what the inventory has seen.
func (s *schedule) someoneElseCuts(g *gpu) {
	about := slices.ContainsFunc(s.claims, func(c *claim) bool { return c.phase != idle })
	if (g.on || !about) && g.someoneElse(4) {
		s.note("an admin cuts %s, and the inventory sees it", g.name())
		s.scan()
	}
}

// rots spoils a file of the plugin's state. What the claim has, whose record it is, nobody can tell any more.
func (s *schedule) rots() {
	visible, _ := s.disk.State()
	var paths []string
	for path := range visible {
		if room := roomOf(filepath.Dir(path)); room == "record" || room == "holder" {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 || !s.chance(30) {
		return
	}
	slices.Sort(paths)
	path := pick(s.dice, paths)
	s.disk.Put(path, []byte("{"))
	s.isUnreadable(path)
}

func (s *schedule) someoneRemovesASpec(c *claim) {
	if c.phase == prepared {
		s.note("someone removes the spec of %s", c.name)
		c.unspecified = true
		s.specs.remove(c.uid)
	}
}

// lives goes on with a claim's life.
func (s *schedule) lives(c *claim) {
	switch {
	case c.phase == idle && c.now == nil:
		s.allocated(c)
		s.prepare(c)
	case c.phase == idle && s.chance(30):
		c.now = nil // freed: it may be allocated anew
	case c.phase == idle:
		s.prepare(c) // the next Pod of a named claim
	case c.phase == wanted && s.chance(60):
		s.prepare(c)
	case c.phase == prepared && s.chance(20):
		s.prepare(c)
	case c.phase == forgotten && s.chance(50):
		s.allocated(c)
		s.prepare(c) // with another allocation
	default:
		s.unprepare(c)
	}
}

// allocated is the scheduler's work, which mostly knows what excludes what.
func (s *schedule) allocated(c *claim) {
	for range 12 {
		gpus := []string{s.gpus[0].name(), s.gpus[1].name()}
		if s.chance(50) {
			slices.Reverse(gpus)
		}
		t := pick(s.dice, templates)
		c.allocate(t, gpus)
		free := !slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" })
		if free || s.chance(10) {
			s.note("claim %s is allocated: %s", c.name, t.name)
			return
		}
	}
}

// forget frees a claim in the API server which the node still has.
func (s *schedule) forget(c *claim) {
	if c.phase == prepared || c.phase == wanted {
		s.note("claim %s is freed behind the kubelet's back", c.name)
		for _, k := range c.calls {
			k.abandoned = true
			k.cancel()
		}
		c.now, c.phase = nil, forgotten
	}
}

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
	ctx, cancel := context.WithTimeout(p.ctx, kubelets)
	k := &call{claim: c, process: p, what: what, of: c.now.DeepCopy(), cancel: cancel, before: s.disturbances()}
	c.calls = append(c.calls, k)
	p.running++
	s.trace = append(s.trace, entry{process: p.id, what: what + " " + c.name})
	s.background(func() func() {
		err := do(ctx, k)
		if err == nil && !p.dead.Load() && !k.abandoned {
			switch what {
			case "Prepare":
				s.answered(k)
			case "Unprepare":
				s.gone(c.uid)
			}
		}
		return func() {
			s.over(p)
			cancel()
			c.calls = slices.DeleteFunc(c.calls, func(other *call) bool { return other == k })
			s.trace = append(s.trace, entry{process: p.id, what: what + " " + c.name + ": " + outcome(err, p, k)})
			if !p.dead.Load() && !k.abandoned {
				then(k, err)
			}
		}
	})
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
		_, err := p.Prepare(ctx, k.of)
		return err
	}, func(k *call, err error) {
		if err == nil {
			c.phase, c.got, c.before = prepared, k.of, s.disturbances()
			c.unspecified = !slices.Equal(k.before, s.disturbances())
		}
	})
}

// unprepare is the kubelet's call. It waits for no Prepare any more.
func (s *schedule) unprepare(c *claim) {
	p := s.takesCalls()
	if p == nil {
		return
	}
	for _, k := range c.calls {
		k.abandoned = true
		k.cancel()
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
			does = p.Mend
		}
		s.does(p, "compares", does, func(error) {})
	}
}

// does lets the plugin do something by itself.
func (s *schedule) does(p *process, what string, work func(context.Context) error, then func(error)) {
	p.running++
	s.background(func() func() {
		err := work(p.ctx)
		return func() {
			s.over(p)
			s.trace = append(s.trace, entry{process: p.id, what: what + ": " + outcome(err, p, &call{})})
			if !p.dead.Load() {
				then(err)
			}
		}
	})
}
