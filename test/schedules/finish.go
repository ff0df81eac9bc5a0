package schedules

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// finish stops injecting faults and lets all calls end. It then kills the plugins and runs
// [world.finalChecks].
func (s *schedule) finish() {
	s.lastingWrites, s.faultPercent, s.absent, s.bias = 0, 0, false, bias{}
	seldomWas := s.chance(50)
	if seldomWas {
		for _, p := range slices.Clone(s.living) {
			s.kill(p)
		}
	}
	s.advance(-1)
	for _, p := range slices.Clone(s.living) {
		s.kill(p)
	}
	s.checkIdle()
	if slices.ContainsFunc(s.gpus, func(g *gpu) bool { return g.lost }) {
		if s.chance(50) {
			s.powerCut()
		}
	}
	if c := pick(s.dice, s.claims); c.phase == prepared && s.chance(50) {
		// The claim's next Pod may be on another node, so that no call follows here.
		s.freeUnnoticed(c)
		s.reallocate(c)
	}
	s.noFaults, s.endsFull = true, s.chance(25)
	s.finalChecks(s.uids())
}

func (s *schedule) uids() []types.UID {
	var uids []types.UID
	for _, c := range s.claims {
		uids = append(uids, c.uids...)
	}
	return uids
}

// onlyUnreadable reports whether err, from a reconciliation, has nothing but claims' records that
// cannot be read.
func onlyUnreadable(err error) bool {
	return err == nil || !slices.ContainsFunc(strings.Split(err.Error(), "\n"), func(line string) bool {
		return !strings.Contains(line, "its devices stay in use")
	})
}

// finalChecks starts a new plugin on a node without faults and unprepares all claims. It adds a
// violation if anything of the plugin is left on the node or if a GPU cannot be prepared again.
func (w *world) finalChecks(uids []types.UID) {
	w.noFaults = true
	w.scan()
	lost := slices.ContainsFunc(w.gpus, func(g *gpu) bool { return g.lost })
	p := w.newProcess()
	if err := p.open(); err != nil {
		w.violates("the plugin does not start after all faults: %v", err)
		return
	}
	err := p.Reconcile(p.ctx)
	w.scan()
	if !lost && onlyUnreadable(err) {
		w.checkReconciled()
	}
	if err := p.collectClaims(p.ctx); err != nil && !lost {
		w.violates("garbage collection after all faults: %v", err)
	}
	w.scan()
	if !lost {
		w.checkNoOrphans()
	}
	w.checkPreparable(p)
	w.note("all claims are unprepared, on a full disk: %v", w.endsFull)
	if w.endsFull {
		w.disk.Fill()
	}
	for _, uid := range uids {
		if err := p.Unprepare(p.ctx, uid); err != nil {
			w.violates("claim %s cannot be unprepared: %v", uid, err)
			continue
		}
		w.checkUnprepared(uid)
	}
	w.disk.Free()
	if err := p.Reconcile(p.ctx); err != nil {
		w.violates("reconciliation after all claims are unprepared: %v", err)
	}
	w.checkEmpty()
	w.scan()
	for _, g := range w.gpus {
		if !g.lost && !g.isAway() && len(g.Instances) == 0 {
			w.checkReusable(p.ctx, p, g.name())
		}
	}
	w.checkModesOff(p)
	w.checkEmpty()
	p.end()
}

// checkModesOff adds a violation if the plugin leaves MIG mode enabled that it had enabled itself
// on a GPU without MIG instances, or if it disables the MIG mode of a GPU on which an admin uses
// MIG.
func (w *world) checkModesOff(p *process) {
	for _, g := range w.snapshot.Node.GPUs {
		card := w.gpu(g.WholeName())
		isAdmins := card.Enabled && !card.modeIsOurs
		if _, err := p.DisableUnusedMIGMode(p.ctx, g.GPU); err != nil {
			w.violates("disable the MIG mode of %s: %v", card.name(), err)
		}
		if card.Enabled && card.modeIsOurs && len(card.Instances) == 0 {
			w.violates("%s is left in MIG mode, which the plugin enabled", card.name())
		}
		if isAdmins && !card.Enabled {
			w.violates("the plugin disabled the MIG mode of %s, which an admin uses", card.name())
		}
	}
}

// checkReusable prepares a claim for the whole GPU, and then one for a partition of it. It adds a
// violation if one of them fails.
func (w *world) checkReusable(ctx context.Context, p *process, gpu string) {
	for _, t := range templates {
		if t.name != "partition" && t.name != "whole" {
			continue
		}
		c := &claim{name: "again", uid: types.UID(fmt.Sprintf("uid-again-%s", gpu))}
		c.allocate(t, []string{gpu})
		if _, err := p.Prepare(ctx, c.now); err != nil {
			w.violates("%s cannot be prepared again as %s: %v", gpu, t.name, err)
		} else if err := w.usable(c.now); err != nil {
			w.violates("%s cannot be prepared again as %s: %v", gpu, t.name, err)
		}
		if err := p.Unprepare(ctx, c.uid); err != nil {
			w.violates("a claim for %s cannot be unprepared: %v", gpu, err)
		}
		w.scan()
	}
}
