package schedules

import (
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
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
	case s.chance(s.favour.rot):
		s.rots()
		s.lives(c)
	case s.favour.gone > 0 && s.chance(s.favour.gone):
		for _, c := range s.claims {
			s.forget(c)
		}
		s.lookForGone()
		s.advance(100)
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
		s.lookForGone()
	case n < 96:
		s.pass(time.Duration(s.IntN(100)) * time.Second)
	default:
		s.forget(c)
		if s.chance(50) {
			s.lookForGone()
		}
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

// inHand says whether a call is under way for the claim whose record it is: what is spoilt between a write and the answer nobody notices.
func (s *schedule) inHand(path string) bool {
	return slices.ContainsFunc(s.claims, func(c *claim) bool { return c.isAbout(path) && len(c.calls) > 0 })
}

// rots spoils a file of the plugin's state. What the claim has, whose record it is, nobody can tell any more.
func (s *schedule) rots() {
	visible, _ := s.disk.State()
	var paths []string
	for path := range visible {
		_, unfinished := durable.Unfinished(filepath.Base(path))
		room := roomOf(filepath.Dir(path))
		if !unfinished && (room == "holder" || room == "record" && !s.inHand(path)) && (s.favour.rotten == "" || s.favour.rotten == room) {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 || !s.chance(max(30, 3*s.favour.rot)) {
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
		c.reserve()
		s.prepare(c) // the next Pod of a named claim
	case c.phase == wanted && s.chance(60):
		s.prepare(c)
	case c.phase == prepared && s.chance(20):
		s.prepare(c)
	case c.phase == forgotten && s.chance(50):
		s.allocatedAnew(c)
		s.prepare(c)
	case c.phase == prepared && s.chance(8):
		s.forget(c)
	default:
		s.unprepare(c)
	}
}

// kinds are those of the claims in this story.
func (s *schedule) kinds() []template {
	if len(s.favour.kinds) == 0 {
		return templates
	}
	return slices.DeleteFunc(slices.Clone(templates), func(t template) bool { return !slices.Contains(s.favour.kinds, t.name) })
}

// allocatedAnew is what comes of a claim that the node still has, and the API server does not: it was deleted, and there is another by its name; or it is
// allocated again, the same devices with other shares of them, or other devices.
func (s *schedule) allocatedAnew(c *claim) {
	if s.chance(30) {
		s.fresh(c)
	}
	if c.kind.name == "" || s.chance(40) {
		s.allocated(c)
		return
	}
	c.allocate(c.kind, c.on)
	if slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" }) {
		s.allocated(c)
		return
	}
	s.note("claim %s is allocated again: %s", c.name, c.kind.name)
}

// comesBack allocates a claim that was freed as it was before, for another Pod.
func (s *schedule) comesBack(uid types.UID) bool {
	i := slices.IndexFunc(s.claims, func(c *claim) bool { return c.uid == uid && c.phase == forgotten && len(c.calls) == 0 })
	if i < 0 {
		return false
	}
	c := s.claims[i]
	c.allocate(c.kind, c.on)
	if slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" }) {
		c.now = nil
		return false
	}
	s.note("claim %s was found to be gone, and is allocated as before", c.name)
	s.prepare(c)
	return true
}

// allocated is the scheduler's work, which mostly knows what excludes what. How much memory is held it
// does not know: it gives on what a Pod holds that was deleted by force.
func (s *schedule) allocated(c *claim) {
	for range 12 {
		gpus := []string{s.gpus[0].name(), s.gpus[1].name()}
		if s.chance(50) {
			slices.Reverse(gpus)
		}
		t := pick(s.dice, s.kinds())
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
