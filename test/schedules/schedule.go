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

// schedule is one story: a world and the dice that decide what happens in it.
type schedule struct {
	*world
	dice

	favour   favour
	coverage *Coverage
	// trouble is how often something goes wrong at a point, in percent.
	trouble float64
	// renews is how often a claim that was given back is deleted, and made again by its name, in percent.
	renews float64
	// lasting is what goes wrong with every write for a while.
	lasting fault
	writes  int
	serial  int
	// begun counts what was begun in the background, and ended has what follows from it, by that number.
	begun int
	ended chan ending
}

type ending struct {
	number int
	then   func()
}

// kubelets is how long the kubelet waits.
const kubelets = 45 * time.Second

// run tells the story of a seed, in a bubble of package synctest. It returns what did not hold.
func run(dir string, seed uint64, coverage *Coverage) (broken []string, story string, err error) {
	d := newDice(seed)
	w, err := newWorld(dir, 2)
	if err != nil {
		return nil, "", err
	}
	s := &schedule{world: w, dice: d, favour: favourOf(seed), coverage: coverage, trouble: pick(d, []float64{0, 0.5, 2, 6}), renews: 40, ended: make(chan ending, 100)}
	w.written = func(string) bool { return d.chance(50) }
	w.restored = func(*gpu) bool { return d.chance(25) }
	claims := 4
	if s.favour.few {
		claims = 2
	}
	for i := range claims {
		c := &claim{name: fmt.Sprintf("c%d", i), phase: idle}
		s.fresh(c)
		w.claims = append(w.claims, c)
	}
	s.start()
	for range 20 + d.IntN(40) {
		s.act()
		s.advance(d.IntN(50))
		if d.chance(30) {
			s.advance(-1)
			s.quiet()
		}
		if len(w.broken) > 0 {
			break
		}
	}
	s.finish()
	return w.broken, w.story(3000), nil
}

// fresh is a claim that was deleted, and made again by the same name.
func (s *schedule) fresh(c *claim) {
	s.serial++
	c.uid = types.UID(fmt.Sprintf("uid-%s-%d", c.name, s.serial))
	c.uids = append(c.uids, c.uid)
	c.now, c.got, c.phase, c.unspecified = nil, nil, idle, false
}

// background does something in a goroutine, and what follows from it in the story's own.
func (s *schedule) background(work func() (then func())) {
	s.begun++
	number := s.begun
	go func() {
		s.ended <- ending{number, work()}
		s.points.tell()
	}()
	// The locks below are real ones: whoever was begun first must get to them first.
	synctest.Wait()
}

// start starts an instance of the plugin, which puts the node in order.
func (s *schedule) start() {
	p := s.newProcess()
	s.note("plugin %d starts", p.id)
	p.running++
	s.background(func() func() {
		err := p.open()
		if err == nil {
			err = p.Recover(p.ctx)
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

// advance lets so many calls of the plugin go on; all, if it is negative, until nothing is under way.
func (s *schedule) advance(n int) {
	for n != 0 {
		at := s.points.settled()
		if s.reap() {
			continue
		}
		switch {
		case len(at) > 0:
			if s.chance(2) {
				s.pass(time.Duration(1+s.IntN(20)) * 10 * time.Millisecond)
			} else {
				s.turn(pick(s.dice, at))
			}
			n--
		case s.underWay() == 0:
			return
		default:
			// Who is under way waits for a time.
			<-s.points.event
		}
	}
}

// reap does what follows from what has ended. What ended at the same moment is taken in the order in which it was begun.
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

func (s *schedule) underWay() int {
	n := s.dying()
	for _, p := range s.living {
		n += p.running
	}
	return n
}

// pass lets time pass while those who wait for their turn wait.
func (s *schedule) pass(d time.Duration) {
	wait(context.Background(), d)
	synctest.Wait()
}

// turn lets a call go on, and decides what goes wrong with it.
func (s *schedule) turn(at *point) {
	f := s.goesWrong(at.step)
	if at.step == foundGone && f == none && s.chance(50) && s.comesBack(at.process.gone) {
		f = slow
	}
	s.meet(at, f)
}

// meet lets a call go on, and this go wrong with it.
func (s *schedule) meet(at *point, f fault) {
	s.coverage.count(at.step, f)
	s.trace = append(s.trace, entry{at.process.id, "", at.step, f})
	gpu := pick(s.dice, s.gpus)
	switch f {
	case killBefore:
		s.kill(at.process)
		return
	case cutBefore:
		s.powerCut()
		return
	case slow:
		s.pause = time.Duration(1+s.IntN(60)) * time.Second
	case givenUp:
		s.giveUp(at.process)
	case twin:
		if len(s.living) < 2 {
			s.start()
		}
	case gpuReset:
		s.reset(gpu)
	case gpuLost:
		s.note("%s falls off the bus", gpu.name())
		gpu.lost = true
		gpu.disturbed++
		s.unspecify()
	case reload:
		for _, g := range s.gpus {
			s.reset(g)
		}
	case clockJump:
		s.clock += time.Duration(s.IntN(48)-24) * time.Hour
	case unserved:
		s.note("the MPS supervisor dies")
		s.supervisorDies()
	}
	s.points.grant(at, f)
}

// reset makes a GPU forget.
func (s *schedule) reset(g *gpu) {
	s.note("%s is reset", g.name())
	if !g.lost {
		g.forget()
	}
	s.unspecify()
}

// unspecify notes that claims may lose their specs, because what they name is gone.
func (s *schedule) unspecify() {
	for _, c := range s.claims {
		c.unspecified = true
	}
}

// goesWrong decides what goes wrong with a step.
func (s *schedule) goesWrong(of step) fault {
	can := of.can()
	if s.writes > 0 && slices.Contains(can, s.lasting) {
		s.writes--
		return s.lasting
	}
	if f := s.favoured(of); f != none {
		return f
	}
	percent := s.trouble
	if other, ok := odds[of]; ok && s.trouble > 0 {
		percent = other
	}
	if len(can) == 0 || !s.chance(percent) {
		return none
	}
	f := pick(s.dice, can)
	if f == full || f == readOnly {
		s.lasting, s.writes = f, s.IntN(12)
	}
	return f
}

// giveUp is a kubelet that goes away with its calls.
func (s *schedule) giveUp(p *process) {
	for _, c := range s.claims {
		for _, k := range c.calls {
			if k.process == p {
				s.note("the kubelet gives up %s of %s", k.what, c.name)
				k.abandoned = true
				k.cancel()
			}
		}
	}
}
