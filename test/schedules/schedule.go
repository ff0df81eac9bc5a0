package schedules

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// schedule is one run: a simulated node with its claims (world), and the random numbers that decide
// what happens (dice).
type schedule struct {
	*world
	dice

	bias     bias
	coverage *Coverage
	// faultPercent is the probability, in percent, that a fault interrupts a call at a fault point.
	faultPercent float64
	// recreatePercent is the percentage of unprepared claims that a new claim with the same name
	// replaces.
	recreatePercent float64
	// The next lastingWrites writes to the disk fail with lastingFault.
	lastingFault  fault
	lastingWrites int
	serial        int
	// begun counts the background tasks so far. ended receives each ended task's number, and the
	// function to run next.
	begun int
	ended chan ending
}

type ending struct {
	number int
	then   func()
}

// kubeletTimeout is how long the kubelet waits for an answer to a call.
const kubeletTimeout = 45 * time.Second

// run runs the schedule of a seed, in a bubble of package synctest. It returns the violated
// invariants and a trace of the events.
func run(dir string, seed uint64, coverage *Coverage) (violations []string, trace string, err error) {
	d := newDice(seed)
	w, err := newWorld(dir, 2)
	if err != nil {
		return nil, "", err
	}
	w.passthrough = true
	w.scan()
	s := &schedule{
		world: w, dice: d, bias: biasOf(seed), coverage: coverage,
		faultPercent: pick(d, []float64{0, 0.5, 2, 6}), recreatePercent: 40, ended: make(chan ending, 100),
	}
	w.nameSurvives = func(string) bool { return d.chance(50) }
	w.adminRestores = func(*gpu) bool { return d.chance(25) }
	claims := 4
	if s.bias.fewClaims {
		claims = 2
	}
	for i := range claims {
		c := &claim{name: fmt.Sprintf("c%d", i), phase: idle}
		s.recreate(c)
		w.claims = append(w.claims, c)
	}
	s.start()
	for range 20 + d.IntN(40) {
		s.act()
		s.advance(d.IntN(50))
		if d.chance(30) {
			s.advance(-1)
			s.checkIdle()
		}
		if len(w.violations) > 0 {
			break
		}
	}
	s.finish()
	return w.violations, w.traceText(3000), nil
}

// recreate replaces claim c with a new claim that has the same name and another UID.
func (s *schedule) recreate(c *claim) {
	s.serial++
	c.uid = types.UID(fmt.Sprintf("uid-%s-%d", c.name, s.serial))
	c.uids = append(c.uids, c.uid)
	c.now, c.got, c.phase, c.specMayBeGone = nil, nil, idle, false
}

// background runs work in a goroutine of its own. When work ends, reap runs the function that work
// returned, in the schedule's goroutine.
func (s *schedule) background(work func() (then func())) {
	s.begun++
	number := s.begun
	go func() {
		s.ended <- ending{number, work()}
		s.blocked.notify()
	}()
	// Wait until the new goroutine blocks. It must reach the locks, which are real, before a goroutine
	// that starts later.
	synctest.Wait()
}

// start starts a new instance of the plugin. Half of them reconcile before the kubelet calls them.
func (s *schedule) start() {
	p := s.newProcess()
	s.note("plugin %d starts", p.id)
	p.running++
	reconciles := s.chance(50)
	s.background(func() func() {
		err := p.open()
		if err == nil && reconciles {
			_ = p.Reconcile(p.ctx)
		}
		return func() {
			p.running--
			switch {
			case p.dead.Load():
			case err != nil:
				s.note("plugin %d does not start: %v", p.id, err)
				s.kill(p)
			default:
				s.note("plugin %d is ready", p.id)
				p.ready = true
			}
		}
	})
}

// advance resumes n waiting calls of the plugin, one after the other. If n is negative, it
// continues until no call is in flight.
func (s *schedule) advance(n int) {
	for n != 0 {
		at := s.blocked.wait()
		if s.reap() {
			continue
		}
		switch {
		case len(at) > 0:
			if s.chance(2) {
				s.passTime(time.Duration(1+s.IntN(20)) * 10 * time.Millisecond)
			} else {
				s.resume(pick(s.dice, at))
			}
			n--
		case s.inFlight() == 0:
			return
		default:
			// No call waits at a fault point, so all calls in flight wait for time to pass.
			<-s.blocked.event
		}
	}
}

// reap runs the functions that ended background tasks returned, in the order in which the tasks
// began. some is false if no task has ended.
func (s *schedule) reap() (some bool) {
	var all []ending
	for {
		select {
		case e := <-s.ended:
			all = append(all, e)
			continue
		default:
		}
		slices.SortFunc(all, func(a, b ending) int { return cmp.Compare(a.number, b.number) })
		for _, e := range all {
			e.then()
		}
		return len(all) > 0
	}
}

func (s *schedule) inFlight() int {
	n := s.dyingCalls()
	for _, p := range s.living {
		n += p.running
	}
	return n
}

// passTime lets time pass. Calls that wait at fault points do not continue.
func (s *schedule) passTime(d time.Duration) {
	wait(context.Background(), d)
	synctest.Wait()
}

// resume resumes a waiting call with a randomly chosen fault, or none.
func (s *schedule) resume(at *blockedCall) {
	f := s.chooseFault(at.point)
	if at.point == foundGone && f == none && s.chance(50) && s.allocateAgain(at.process.orphan) {
		f = slow
	}
	s.inject(at, f)
}

// inject makes fault f happen at the fault point, and resumes the call that waits there.
func (s *schedule) inject(at *blockedCall, f fault) {
	s.coverage.count(at.point, f)
	s.trace = append(s.trace, entry{at.process.id, "", at.point, f})
	gpu := pick(s.dice, s.gpus)
	switch f {
	case killBefore:
		s.kill(at.process)
		return
	case cutBefore:
		s.powerCut()
		return
	case slow:
		// No limit of a call ends at the same moment: whether the call notices would be left to chance.
		s.slowFor = time.Duration(1+s.IntN(60))*time.Second + time.Millisecond
	case givenUp:
		s.giveUp(at.process)
	case secondInstance:
		if len(s.living) < 2 {
			s.start()
		}
	case gpuReset:
		s.reset(gpu)
	case gpuLost:
		s.note("%s falls off the bus", gpu.name())
		gpu.lost = true
		gpu.disturbed++
		s.expectMissingSpecs()
	case reload:
		for _, g := range s.gpus {
			s.reset(g)
		}
		s.loadDriver(s.Perm(len(s.gpus)))
	case clockJump:
		s.clockOffset += time.Duration(s.IntN(48)-24) * time.Hour
	case supervisorDeath:
		s.note("the MPS supervisor dies")
		s.supervisorDies()
	}
	s.blocked.resume(at, f)
}

// reset resets GPU g, as an admin may do at any time.
func (s *schedule) reset(g *gpu) {
	s.note("%s is reset", g.name())
	if !g.lost {
		g.reset()
	}
	s.expectMissingSpecs()
}

// expectMissingSpecs notes that every claim may lose its CDI spec, because the plugin removes the
// specs of devices that may be gone.
func (s *schedule) expectMissingSpecs() {
	for _, c := range s.claims {
		c.specMayBeGone = true
	}
}

// chooseFault chooses the fault to inject at the fault point of, or none.
func (s *schedule) chooseFault(of faultPoint) fault {
	possible := of.possible()
	if s.lastingWrites > 0 && slices.Contains(possible, s.lastingFault) {
		s.lastingWrites--
		return s.lastingFault
	}
	if f := s.biasedFault(of); f != none {
		return f
	}
	percent := s.faultPercent
	if other, ok := odds[of]; ok && s.faultPercent > 0 {
		percent = other
	}
	if len(possible) == 0 || !s.chance(percent) {
		return none
	}
	f := pick(s.dice, possible)
	if f == full || f == readOnly {
		s.lastingFault, s.lastingWrites = f, s.IntN(12)
	}
	return f
}

// giveUp cancels the context of all calls of the kubelet to process p. The kubelet no longer waits
// for their answers.
func (s *schedule) giveUp(p *process) {
	for _, c := range s.claims {
		for _, k := range c.calls {
			if k.process == p {
				s.note("the kubelet gives up %s of claim %s", k.what, c.name)
				k.abandoned = true
				k.cancel()
			}
		}
	}
}
