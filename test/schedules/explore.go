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

// explorer visits every state that a node with a few claims can reach. From each state it runs each
// operation and interrupts it at each fault point with each fault. It also interleaves pairs of
// operations of two plugin instances. Each operation runs in a process that has just started, so it
// knows the least that a process can know.
type explorer struct {
	lockFile string
	// templates are the kinds of the claims. Each gives one claim its allocation.
	templates []template
	seen      map[[32]byte]bool
	// states and transitions count the saved states and the runs of operations so far.
	states, transitions int
	violations          []string
}

// savedState is a copy of the simulated node and its claims, taken when no call is in flight.
type savedState struct {
	node   *node
	specs  *inMemory
	claims []claim
	how    string
}

// operation is one thing that a plugin process can do, such as preparing a certain claim.
type operation struct {
	name string
	// possible reports whether the kubelet or the plugin would start this operation in the schedule's
	// current state.
	possible func(s *schedule) bool
	do       func(s *schedule, p *process)
}

// world returns a schedule that begins with a copy of saved state m, so that operations run there
// do not change m.
func (e *explorer) world(m *savedState) *schedule {
	w := &world{
		node: m.node.clone(), specs: m.specs.clone(), lockFile: e.lockFile, blocked: newBlockedCalls(),
		nameSurvives:  func(string) bool { return false },
		adminRestores: func(*gpu) bool { return false },
	}
	for _, c := range m.claims {
		w.claims = append(w.claims, &c)
	}
	return &schedule{world: w, dice: newDice(1), coverage: NewCoverage(), ended: make(chan ending, 100)}
}

func (s *schedule) savedState(how string) *savedState {
	//nolint:forcetypeassert // the explorer's worlds have no other type
	m := &savedState{node: s.node, specs: s.specs.(*inMemory), how: how}
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
		copied.Instances, copied.adminInstances = maps.Clone(g.Instances), maps.Clone(g.adminInstances)
		c.gpus[i] = &copied
	}
	return &c
}

func (s *inMemory) clone() *inMemory {
	return &inMemory{maps.Clone(s.claims), maps.Clone(s.metadata), s.based}
}

// hash returns a digest of the state. Two states have the same digest if the plugin would behave
// the same in both.
func (m *savedState) hash() ([32]byte, error) {
	type card struct {
		On                          bool
		Instances                   any
		Mode, Slice, AdminInstances any
		Lost, RestoredAtBoot        bool
		Disturbed                   int
		PCI                         any
	}
	visible, synced := m.node.disk.State()
	state := struct {
		Visible, Synced map[string][]byte
		Cards           []card
		Daemons         any
		Snapshot        any
		Specs           map[types.UID][]specs.Device
		Metadata        any
		Based           bool
		Claims          []string
		Boots           int
	}{visible, synced, nil, m.node.daemons, m.node.snapshot, m.specs.claims, m.specs.metadata, m.specs.based, nil, m.node.boots}
	for _, g := range m.node.gpus {
		state.Cards = append(state.Cards, card{
			g.Enabled, g.Instances, g.ComputeMode, g.TimeSlice, g.adminInstances, g.lost, g.restoredAtBoot, g.disturbed, g.pci,
		})
	}
	for _, c := range m.claims {
		state.Claims = append(state.Claims, fmt.Sprint(c.phase, c.specMayBeGone, c.isReserved()))
	}
	raw, err := json.Marshal(state)
	return sha256.Sum256(raw), err
}

func (e *explorer) start() *savedState {
	n := newNode(len(e.templates[0].results([]string{"a", "b"})))
	gpus := []string{n.gpus[0].name(), n.gpus[len(n.gpus)-1].name()}
	n.passthrough = true
	n.scan()
	m := &savedState{node: n, specs: newInMemory(), how: "the start"}
	for i, t := range e.templates {
		c := claim{name: fmt.Sprintf("c%d", i), uid: types.UID(fmt.Sprintf("uid-c%d", i)), phase: idle}
		c.uids = []types.UID{c.uid}
		c.allocate(t, gpus)
		m.claims = append(m.claims, c)
	}
	return m
}

// operations returns every operation that the explorer tries.
func (e *explorer) operations() []operation {
	var all []operation
	for i := range e.templates {
		all = append(all,
			operation{fmt.Sprintf("Prepare c%d", i), func(s *schedule) bool { return s.claims[i].phase != leaving },
				func(s *schedule, _ *process) { s.claims[i].reserve(); s.prepare(s.claims[i]) }},
			operation{fmt.Sprintf("Unprepare c%d", i), func(s *schedule) bool { return s.claims[i].phase != idle },
				func(s *schedule, _ *process) { s.unprepare(s.claims[i]) }})
	}
	always := func(*schedule) bool { return true }
	return append(all,
		operation{"reconcile", always, func(s *schedule, p *process) {
			s.runTask(p, "reconciles", p.Reconcile, func(err error) {
				if err == nil && len(s.living) == 1 {
					s.checkReconciled()
				}
			})
		}},
		operation{"the inventory scans", always, func(s *schedule, _ *process) { s.scan() }},
		operation{"GPU reset", func(s *schedule) bool { return s.gpus[0].disturbed == 0 },
			func(s *schedule, _ *process) { s.reset(s.gpus[0]); s.scan() }},
	)
}

// begin starts a new plugin process, which runs the operation.
func (s *schedule) begin(o operation) *process {
	s.noFaults = true
	p := s.newProcess()
	if err := p.open(); err != nil {
		s.violates("the plugin does not start: %v", err)
	}
	s.noFaults = false
	for _, other := range s.living {
		other.ready = other == p
	}
	p.ready = true
	o.do(s, p)
	return p
}

// runWithFault runs the operation and injects fault f at its n-th fault point. The result met is
// false if the operation has fewer fault points, or if f cannot interrupt the n-th.
func (s *schedule) runWithFault(o operation, n int, f fault) (met bool) {
	s.begin(o)
	for points := 1; s.inFlight() > 0; {
		at := s.blocked.wait()
		switch {
		case s.reap():
		case len(at) == 0:
			<-s.blocked.event
		case points != n:
			s.inject(at[0], none)
			points++
		default:
			points++
			if met = slices.Contains(at[0].point.possible(), f); !met {
				f = none
			}
			s.inject(at[0], f)
		}
	}
	s.reap()
	return met
}

// faultsTried are the faults with which the explorer interrupts an operation. A kill after a fault
// point is not among them, because it equals a kill before the next fault point.
var faultsTried = []fault{killBefore, killWithin, cutBefore, fails, lostAnswer}

// successors runs every operation from state m, without a fault and with every fault at every fault
// point. It returns the states that were not seen before.
func (e *explorer) successors(m *savedState) []*savedState {
	var next []*savedState
	for _, o := range e.operations() {
		if !o.possible(e.world(m)) {
			continue
		}
		points := 0
		next = e.try(next, m, o.name, func(s *schedule) bool {
			s.runWithFault(o, 0, none)
			for _, line := range s.trace {
				if line.point != "" {
					points++
				}
			}
			return true
		})
		for n := 1; n <= points; n++ {
			for _, f := range faultsTried {
				how := fmt.Sprintf("%s, %s at point %d", o.name, f, n)
				next = e.try(next, m, how, func(s *schedule) bool { return s.runWithFault(o, n, f) })
			}
			how := fmt.Sprintf("%s, %s at point %d", o.name, cutBefore, n)
			next = e.try(next, m, how+", and the disk has all names", func(s *schedule) bool {
				s.nameSurvives = func(string) bool { return true }
				return s.runWithFault(o, n, cutBefore)
			})
			next = e.try(next, m, how+", and an admin restores the instances", func(s *schedule) bool {
				s.adminRestores = func(*gpu) bool { return true }
				return s.runWithFault(o, n, cutBefore)
			})
		}
	}
	return next
}

// try copies state m, runs task on the copy, and adds a violation if an invariant is broken
// afterwards. If no earlier task led to the resulting state, try appends that to next. how
// describes the task in messages.
func (e *explorer) try(next []*savedState, m *savedState, how string, task func(*schedule) bool) []*savedState {
	s := e.world(m)
	if len(e.violations) > 0 || !task(s) {
		return next
	}
	e.transitions++
	for _, p := range slices.Clone(s.living) {
		s.kill(p)
	}
	s.dead, s.trace = nil, s.trace[:0:0]
	s.checkIdle()
	after := s.savedState(m.how + "; " + how)
	hash, err := after.hash()
	if err != nil {
		s.violates("hash the state: %v", err)
	}
	if len(s.violations) == 0 && !e.seen[hash] {
		e.seen[hash] = true
		e.states++
		next = append(next, after)
		last := e.world(after)
		last.finalChecks(last.uids())
		s.violations = last.violations
	}
	for _, b := range s.violations {
		e.violations = append(e.violations, fmt.Sprintf("%s: %s", after.how, b))
	}
	return next
}

// explore returns all states that at most depth operations lead to from the initial state.
func (e *explorer) explore(ctx context.Context, depth int) []*savedState {
	e.seen = map[[32]byte]bool{}
	level := []*savedState{e.start()}
	all := level
	for range depth {
		var next []*savedState
		for _, m := range level {
			if ctx.Err() != nil || len(e.violations) > 0 {
				return all
			}
			next = append(next, e.successors(m)...)
		}
		level = next
		all = append(all, next...)
	}
	return all
}

// calmStates returns those states that were reached without a fault and in which every claim is
// idle or prepared. The explorer tries pairs of operations only from these.
func (e *explorer) calmStates(all []*savedState) []*savedState {
	return slices.DeleteFunc(slices.Clone(all), func(m *savedState) bool {
		for _, disturbance := range []string{" at point ", "reset", "inventory"} {
			if strings.Contains(m.how, disturbance) {
				return true
			}
		}
		return slices.ContainsFunc(m.claims, func(c claim) bool { return c.phase != idle && c.phase != prepared })
	})
}

// pairs runs every pair of operations in two plugin instances at the same time, from state m. It
// runs each pair twice, and the second time kills the first instance when the second one has done
// its part.
func (e *explorer) pairs(m *savedState) {
	all := e.operations()
	for _, a := range all {
		for _, b := range all {
			if a.name == b.name && a.name != "reconcile" || !a.possible(e.world(m)) || !b.possible(e.world(m)) {
				continue
			}
			for _, killed := range []bool{false, true} {
				e.pair(m, a, b, killed)
			}
		}
	}
}

func (e *explorer) pair(m *savedState, a, b operation, killed bool) {
	for i, reached := 0, true; reached && len(e.violations) == 0; i++ {
		how := fmt.Sprintf("%s to point %d, %s to its end, killed: %v", a.name, i, b.name, killed)
		e.try(nil, m, how, func(s *schedule) bool {
			reached = s.interleave(a, b, i, killed)
			return true
		})
	}
}

// interleave runs operation a to its i-th fault point, then b as far as a's locks allow. If killed
// is set, it then kills the process of a. Finally it runs all that is left. The result reached is
// false if a has fewer than i fault points.
func (s *schedule) interleave(a, b operation, i int, killed bool) (reached bool) {
	one := s.begin(a)
	reached = s.runOnly(one, i)
	other := s.begin(b)
	s.runOnly(other, -1)
	if killed {
		s.kill(one)
	}
	s.runOnly(one, -1)
	s.runOnly(other, -1)
	s.runRest()
	return reached
}

// runOnly resumes only process p until it has passed the given number of fault points, or as far as
// possible if that number is negative. It returns false if p ends earlier or waits for another
// process.
func (s *schedule) runOnly(p *process, points int) bool {
	for points != 0 {
		at := s.blocked.wait()
		if s.reap() {
			continue
		}
		i := slices.IndexFunc(at, func(w *blockedCall) bool { return w.process == p })
		if i < 0 {
			return false
		}
		s.inject(at[i], none)
		points--
	}
	return true
}

// runRest runs all processes until no call is in flight.
func (s *schedule) runRest() {
	for s.inFlight() > 0 {
		at := s.blocked.wait()
		switch {
		case s.reap():
		case len(at) > 0:
			s.inject(at[0], none)
		default:
			<-s.blocked.event
		}
	}
	s.reap()
}
