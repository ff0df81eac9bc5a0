package schedules

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"
)

// explorer goes everywhere that a small world can go: from each state by each operation, ended at each of its points in each way, and by pairs of operations
// of two instances in turns. An operation is one of a process that has just been started and has put nothing in order, which is the least that a process
// can know; putting in order is an operation too.
type explorer struct {
	lockDir string
	// of are the claims' allocations.
	of   []template
	seen map[[32]byte]bool
	// States and transitions are counted.
	states, transitions int
	broken              []string
}

// moment is a state of the world, in which nothing is under way.
type moment struct {
	node   *node
	specs  *inMemory
	claims []claim
	how    string
}

// operation is what the world can be asked for.
type operation struct {
	name string
	// can says whether the kubelet, or the plugin itself, would do so now.
	can func(s *schedule) bool
	do  func(s *schedule, p *process)
}

// world is the state again, in which something can be done.
func (e *explorer) world(m *moment) *schedule {
	w := &world{node: m.node.clone(), specs: m.specs.clone(), lockDir: e.lockDir, points: newPoints(), written: func(string) bool { return false }, restored: func(*gpu) bool { return false }}
	for _, c := range m.claims {
		w.claims = append(w.claims, &c)
	}
	return &schedule{world: w, dice: newDice(1), coverage: NewCoverage(), ended: make(chan ending, 100)}
}

func (s *schedule) moment(how string) *moment {
	m := &moment{node: s.node, specs: s.specs.(*inMemory), how: how} //nolint:forcetypeassert // the explorer's worlds have no other
	for _, c := range s.claims {
		m.claims = append(m.claims, *c)
	}
	return m
}

func (n *node) clone() *node {
	c := *n
	c.disk, c.daemons = n.disk.Clone(), maps.Clone(n.daemons)
	c.gpus = make([]*gpu, len(n.gpus))
	for i, g := range n.gpus {
		copied := *g
		copied.instances, copied.theirs = maps.Clone(g.instances), maps.Clone(g.theirs)
		c.gpus[i] = &copied
	}
	return &c
}

func (s *inMemory) clone() *inMemory { return &inMemory{maps.Clone(s.claims), s.based} }

// hash is the same for states that cannot be told apart.
func (m *moment) hash() ([32]byte, error) {
	type card struct {
		On                  bool
		Instances           any
		Mode, Slice, Theirs any
		Lost, Recut         bool
		Disturbed           int
	}
	visible, synced := m.node.disk.State()
	state := struct {
		Visible, Synced map[string][]byte
		Cards           []card
		Daemons         any
		Snapshot        any
		Specs           map[types.UID][]specs.Device
		Based           bool
		Claims          []string
		Boots           int
	}{visible, synced, nil, m.node.daemons, m.node.snapshot, m.specs.claims, m.specs.based, nil, m.node.boots}
	for _, g := range m.node.gpus {
		state.Cards = append(state.Cards, card{g.on, g.instances, g.mode, g.slice, g.theirs, g.lost, g.recut, g.disturbed})
	}
	for _, c := range m.claims {
		state.Claims = append(state.Claims, fmt.Sprint(c.phase, c.unspecified, c.isReserved()))
	}
	raw, err := json.Marshal(state)
	return sha256.Sum256(raw), err
}

func (e *explorer) start() *moment {
	n := newNode(len(e.of[0].results([]string{"a", "b"})))
	gpus := []string{n.gpus[0].name(), n.gpus[len(n.gpus)-1].name()}
	m := &moment{node: n, specs: &inMemory{claims: map[types.UID][]specs.Device{}}, how: "the start"}
	for i, t := range e.of {
		c := claim{name: fmt.Sprintf("c%d", i), uid: types.UID(fmt.Sprintf("uid-c%d", i)), phase: idle}
		c.uids = []types.UID{c.uid}
		c.allocate(t, gpus)
		m.claims = append(m.claims, c)
	}
	return m
}

// operations are all that there are.
func (e *explorer) operations() []operation {
	var all []operation
	for i := range e.of {
		all = append(all,
			operation{fmt.Sprintf("Prepare c%d", i), func(s *schedule) bool { return s.claims[i].phase != leaving },
				func(s *schedule, _ *process) { s.claims[i].reserve(); s.prepare(s.claims[i]) }},
			operation{fmt.Sprintf("Unprepare c%d", i), func(s *schedule) bool { return s.claims[i].phase != idle },
				func(s *schedule, _ *process) { s.unprepare(s.claims[i]) }})
	}
	always := func(*schedule) bool { return true }
	return append(all,
		operation{"put in order", always, func(s *schedule, p *process) { s.does(p, "puts in order", p.Recover, func(error) {}) }},
		operation{"compare", always, func(s *schedule, p *process) {
			s.does(p, "compares", p.Reconcile, func(err error) {
				if err == nil && len(s.living) == 1 {
					s.compared()
				}
			})
		}},
		operation{"the inventory looks", always, func(s *schedule, _ *process) { s.scan() }},
		operation{"GPU reset", func(s *schedule) bool { return s.gpus[0].disturbed == 0 }, func(s *schedule, _ *process) { s.reset(s.gpus[0]); s.scan() }},
	)
}

// begin starts a process that does the operation.
func (s *schedule) begin(o operation) *process {
	s.calm = true
	p := s.newProcess()
	if err := p.open(); err != nil {
		s.breaks("a process does not start: %v", err)
	}
	s.calm = false
	for _, other := range s.living {
		other.ready = other == p
	}
	p.ready = true
	o.do(s, p)
	return p
}

// once does the operation, and lets a fault meet it at its n-th point. It is false if there was none, or the fault cannot happen there.
func (s *schedule) once(o operation, n int, f fault) (met bool) {
	s.begin(o)
	for points := 1; s.underWay() > 0; {
		at := s.points.settled()
		switch {
		case s.reap():
		case len(at) == 0:
			<-s.points.event
		case points != n:
			s.meet(at[0], none)
			points++
		default:
			points++
			if met = slices.Contains(at[0].step.can(), f); !met {
				f = none
			}
			s.meet(at[0], f)
		}
	}
	s.reap()
	return met
}

// ends are the ways in which an operation is ended at a point. A kill after a point is one before the next.
var ends = []fault{killBefore, killWithin, cutBefore, fails, lostAnswer}

// from goes on from a state, and returns the states that were not seen before.
func (e *explorer) from(m *moment) []*moment {
	var next []*moment
	for _, o := range e.operations() {
		if !o.can(e.world(m)) {
			continue
		}
		points := 0
		next = e.try(next, m, o.name, func(s *schedule) bool {
			s.once(o, 0, none)
			for _, line := range s.trace {
				if line.step != "" {
					points++
				}
			}
			return true
		})
		for n := 1; n <= points; n++ {
			for _, f := range ends {
				next = e.try(next, m, fmt.Sprintf("%s, %s at point %d", o.name, f, n), func(s *schedule) bool { return s.once(o, n, f) })
			}
			next = e.try(next, m, fmt.Sprintf("%s, %s at point %d, and the disk has all", o.name, cutBefore, n), func(s *schedule) bool {
				s.written = func(string) bool { return true }
				return s.once(o, n, cutBefore)
			})
			next = e.try(next, m, fmt.Sprintf("%s, %s at point %d, and an admin cuts again what was there", o.name, cutBefore, n), func(s *schedule) bool {
				s.restored = func(*gpu) bool { return true }
				return s.once(o, n, cutBefore)
			})
		}
	}
	return next
}

// try goes one way, and looks at where it leads.
func (e *explorer) try(next []*moment, m *moment, how string, does func(*schedule) bool) []*moment {
	s := e.world(m)
	if len(e.broken) > 0 || !does(s) {
		return next
	}
	e.transitions++
	for _, p := range slices.Clone(s.living) {
		s.kill(p)
	}
	s.dead, s.trace = nil, s.trace[:0:0]
	s.quiet()
	after := s.moment(m.how + "; " + how)
	hash, err := after.hash()
	if err != nil {
		s.breaks("tell the state: %v", err)
	}
	if len(s.broken) == 0 && !e.seen[hash] {
		e.seen[hash] = true
		e.states++
		next = append(next, after)
		last := e.world(after)
		last.settle(last.uids())
		s.broken = last.broken
	}
	for _, b := range s.broken {
		e.broken = append(e.broken, fmt.Sprintf("%s: %s", after.how, b))
	}
	return next
}

// explore goes as many operations deep.
func (e *explorer) explore(ctx context.Context, depth int) []*moment {
	e.seen = map[[32]byte]bool{}
	level := []*moment{e.start()}
	all := level
	for range depth {
		var next []*moment
		for _, m := range level {
			if ctx.Err() != nil || len(e.broken) > 0 {
				return all
			}
			next = append(next, e.from(m)...)
		}
		level = next
		all = append(all, next...)
	}
	return all
}

// quietest are the states without any fault on the way, in which each claim is idle or prepared: from these pairs of operations are begun.
func (e *explorer) quietest(all []*moment) []*moment {
	return slices.DeleteFunc(slices.Clone(all), func(m *moment) bool {
		plain := !strings.Contains(m.how, " at point ") && !strings.Contains(m.how, "reset") && !strings.Contains(m.how, "inventory")
		return !plain || slices.ContainsFunc(m.claims, func(c claim) bool { return c.phase != idle && c.phase != prepared })
	})
}

// pairs lets two instances do an operation each, at the same time, from a state: the one goes on to a point, the other as far as it can, then the one to its
// end, and the other. killed says that the one is killed in the place of going on.
func (e *explorer) pairs(m *moment) {
	all := e.operations()
	for _, a := range all {
		for _, b := range all {
			if a.name == b.name && a.name != "compare" || !a.can(e.world(m)) || !b.can(e.world(m)) {
				continue
			}
			for _, killed := range []bool{false, true} {
				e.turns(m, a, b, killed)
			}
		}
	}
}

func (e *explorer) turns(m *moment, a, b operation, killed bool) {
	for i, reached := 0, true; reached && len(e.broken) == 0; i++ {
		e.try(nil, m, fmt.Sprintf("%s to point %d, %s to its end, killed: %v", a.name, i, b.name, killed), func(s *schedule) bool {
			reached = s.beside(a, b, i, killed)
			return true
		})
	}
}

// beside says whether the one came to its point. The other goes as far as the one's locks let it.
func (s *schedule) beside(a, b operation, i int, killed bool) (reached bool) {
	one := s.begin(a)
	reached = s.only(one, i)
	other := s.begin(b)
	s.only(other, -1)
	if killed {
		s.kill(one)
	}
	s.only(one, -1)
	s.only(other, -1)
	s.rest()
	return reached
}

// only lets one process go on, for so many points or to its end. It is false if it has ended before, or waits for the other.
func (s *schedule) only(p *process, points int) bool {
	for points != 0 {
		at := s.points.settled()
		if s.reap() {
			continue
		}
		i := slices.IndexFunc(at, func(w *point) bool { return w.process == p })
		if i < 0 {
			return false
		}
		s.meet(at[i], none)
		points--
	}
	return true
}

// rest lets both go on to their ends.
func (s *schedule) rest() {
	for s.underWay() > 0 {
		at := s.points.settled()
		switch {
		case s.reap():
		case len(at) > 0:
			s.meet(at[0], none)
		default:
			<-s.points.event
		}
	}
	s.reap()
}
