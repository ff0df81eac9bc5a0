package schedules

import (
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// act makes one random event happen outside the plugin: a call of the kubelet, a kill, a power cut,
// an admin's action, ….
func (s *schedule) act() {
	if len(s.living) == 0 {
		s.start()
		s.advance(s.IntN(60))
		return
	}
	n := s.IntN(100)
	c := pick(s.dice, s.claims)
	switch {
	case s.chance(s.bias.corrupt):
		s.corruptFile()
		s.stepClaim(c)
	case s.bias.gone > 0 && s.chance(s.bias.gone):
		for _, c := range s.claims {
			s.freeUnnoticed(c)
		}
		s.collectGarbage()
		s.advance(100)
	case s.chance(s.bias.together):
		if len(s.living) < 2 {
			s.start()
		}
		for _, c := range s.claims {
			s.stepClaim(c)
		}
	case n < 56:
		s.stepClaim(c)
	case n < 66:
		s.reconcile()
	case n < 70:
		s.scan()
		s.note("the inventory scans")
	case n < 75:
		if len(s.living) < 2 {
			s.start()
		}
	case n < 79:
		s.kill(pick(s.dice, s.living))
	case n < 81:
		s.powerCut()
	case n < 84:
		s.adminPartitions(pick(s.dice, s.gpus))
	case n < 87:
		s.removeSpec(c)
	case n < 89:
		s.reset(pick(s.dice, s.gpus))
	case n < 91 && s.absent:
		s.note("the MPS supervisor is back")
		s.absent = false
	case n < 93:
		// Two Prepare calls for one claim run at once. The kubelet no longer waits for one of them.
		if c.phase == prepared && len(c.calls) == 0 {
			s.prepare(c)
			s.prepare(c)
		}
	case n < 94:
		s.corruptFile()
	case n < 95:
		s.collectGarbage()
	case n < 96:
		s.passTime(time.Duration(s.IntN(100)) * time.Second)
	default:
		s.freeUnnoticed(c)
		if s.chance(50) {
			s.collectGarbage()
		}
	}
}

// adminPartitions simulates an admin who creates a MIG instance. While claims exist, the simulated
// admin does not enable MIG mode, because a Prepare of a whole GPU uses the MIG mode that the last
// scan of the GPUs found.
func (s *schedule) adminPartitions(g *gpu) {
	about := slices.ContainsFunc(s.claims, func(c *claim) bool { return c.phase != idle })
	if (g.Enabled || !about) && g.adminCreates(4) {
		s.note("an admin creates a MIG instance on %s, and the inventory scans", g.name())
		s.scan()
	}
}

// hasCall reports whether a call is in flight for the claim whose checkpoint record is at path.
// corruptFile leaves such a record alone: a Prepare that succeeds after the damage would count as a
// violation.
func (s *schedule) hasCall(path string) bool {
	return slices.ContainsFunc(s.claims, func(c *claim) bool { return c.isAbout(path) && len(c.calls) > 0 })
}

// corruptFile damages a file of the plugin's state. If that file is a claim's checkpoint record,
// the plugin can no longer know the claim's devices.
func (s *schedule) corruptFile() {
	visible, _ := s.disk.State()
	var paths []string
	for path := range visible {
		_, unfinished := durable.Unfinished(filepath.Base(path))
		stateDir := stateDirOf(filepath.Dir(path))
		wanted := s.bias.corruptDir == "" || s.bias.corruptDir == stateDir
		if !unfinished && (stateDir == "holder" || stateDir == "record" && !s.hasCall(path)) && wanted {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 || !s.chance(max(30, 3*s.bias.corrupt)) {
		return
	}
	slices.Sort(paths)
	path := pick(s.dice, paths)
	s.noteShared(path)
	s.disk.Put(path, []byte("{"))
	s.markUnreadable(path)
}

func (s *schedule) removeSpec(c *claim) {
	if c.phase == prepared {
		s.note("an admin removes the CDI spec of claim %s", c.name)
		c.specMayBeGone = true
		s.specs.remove(c.uid)
	}
}

// stepClaim makes the next event in the life of claim c happen: an allocation, a call of the
// kubelet or a deallocation.
func (s *schedule) stepClaim(c *claim) {
	switch {
	case c.phase == idle && c.now == nil:
		s.allocate(c)
		s.prepare(c)
	case c.phase == idle && s.chance(30):
		c.now = nil // the claim is deallocated, and may be allocated again
	case c.phase == idle:
		c.reserve()
		s.prepare(c) // for the next Pod that uses the claim
	case c.phase == wanted && s.chance(60):
		s.prepare(c)
	case c.phase == prepared && s.chance(20):
		s.prepare(c)
	case c.phase == forgotten && s.chance(50):
		s.reallocate(c)
		s.prepare(c)
	case c.phase == prepared && s.chance(8):
		s.freeUnnoticed(c)
	default:
		s.unprepare(c)
	}
}

// claimKinds returns the kinds of claims that this schedule creates.
func (s *schedule) claimKinds() []template {
	if len(s.bias.claimKinds) == 0 {
		return templates
	}
	return slices.DeleteFunc(slices.Clone(templates), func(t template) bool { return !slices.Contains(s.bias.claimKinds, t.name) })
}

// reallocate changes a claim that was deallocated in the API server but is still prepared on the
// node. Either a new claim with the same name replaces it, or it is allocated again, to the same
// devices with new share IDs or to other devices.
func (s *schedule) reallocate(c *claim) {
	if s.chance(30) {
		s.recreate(c)
	}
	if c.kind.name == "" || s.chance(40) {
		s.allocate(c)
		return
	}
	c.allocate(c.kind, c.gpus)
	if slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" }) {
		s.allocate(c)
		return
	}
	s.note("claim %s is allocated again: %s", c.name, c.kind.name)
}

// allocateAgain allocates a deallocated claim again with the same devices, for another Pod. It
// reports whether the claim was allocated.
func (s *schedule) allocateAgain(uid types.UID) bool {
	i := slices.IndexFunc(s.claims, func(c *claim) bool { return c.uid == uid && c.phase == forgotten && len(c.calls) == 0 })
	if i < 0 {
		return false
	}
	c := s.claims[i]
	c.allocate(c.kind, c.gpus)
	if slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" }) {
		c.now = nil
		return false
	}
	s.note("claim %s was found to be orphaned, and is allocated as before", c.name)
	s.prepare(c)
	return true
}

// allocate gives claim c devices in place of the scheduler. It mostly avoids devices that exclude
// those of other claims, but it ignores how much memory those claims hold. So it may allocate
// memory that a force-deleted Pod still uses.
func (s *schedule) allocate(c *claim) {
	for range 12 {
		gpus := []string{s.gpus[0].name(), s.gpus[1].name()}
		if s.chance(50) {
			slices.Reverse(gpus)
		}
		t := pick(s.dice, s.claimKinds())
		c.allocate(t, gpus)
		free := !slices.ContainsFunc(s.claims, func(o *claim) bool { return o != c && s.conflict(c.now, o.now) != "" })
		if free || s.chance(10) {
			s.note("claim %s is allocated: %s", c.name, t.name)
			return
		}
	}
}

// freeUnnoticed deallocates a claim in the API server without the kubelet, so the claim stays
// prepared on the node.
func (s *schedule) freeUnnoticed(c *claim) {
	if c.phase == prepared || c.phase == wanted {
		s.note("claim %s is deallocated without the kubelet", c.name)
		for _, k := range c.calls {
			k.abandoned = true
			k.cancel()
		}
		c.now, c.phase = nil, forgotten
	}
}
