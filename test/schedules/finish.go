package schedules

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// finish lets everything work again, and gives everything back.
func (s *schedule) finish() {
	s.writes, s.trouble, s.absent, s.favour = 0, 0, false, favour{}
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
	s.quiet()
	if slices.ContainsFunc(s.gpus, func(g *gpu) bool { return g.lost }) {
		if s.chance(50) {
			s.powerCut()
		}
	}
	s.calm = true
	s.settle(s.uids())
}

func (s *schedule) uids() []types.UID {
	var uids []types.UID
	for _, c := range s.claims {
		uids = append(uids, c.uids...)
	}
	return uids
}

// settle is a new plugin on a node on which everything works.
func (w *world) settle(uids []types.UID) {
	w.calm = true
	w.scan()
	lost := slices.ContainsFunc(w.gpus, func(g *gpu) bool { return g.lost })
	p := w.newProcess()
	if err := p.open(); err != nil {
		w.breaks("the last plugin does not start: %v", err)
		return
	}
	if err := p.Recover(p.ctx); err != nil {
		w.breaks("the last plugin does not recover: %v", err)
	}
	err := p.Reconcile(p.ctx)
	w.scan()
	if err == nil && !lost {
		w.compared()
	}
	if err := p.giveBackGone(p.ctx); err != nil && !lost {
		w.breaks("the last look for claims that are gone: %v", err)
	}
	if !lost {
		w.noneGone()
	}
	w.canBePrepared(p)
	w.note("all claims are given back")
	for _, uid := range uids {
		if err := p.Unprepare(p.ctx, uid); err != nil {
			w.breaks("claim %s cannot be given back: %v", uid, err)
			continue
		}
		w.gone(uid)
	}
	if err := p.Reconcile(p.ctx); err != nil {
		w.breaks("the last comparison: %v", err)
	}
	w.empty()
	w.scan()
	for _, g := range w.gpus {
		if !g.lost && len(g.instances) == 0 {
			w.hadAgain(p.ctx, p, g.name())
		}
	}
	w.wholeAgain(p)
	w.empty()
	p.end()
}

// wholeAgain makes sure that no card is left in a MIG mode of ours where nothing is cut, and that
// an admin's mode stays.
func (w *world) wholeAgain(p *process) {
	for _, g := range w.snapshot.Node.GPUs {
		card := w.gpu(g.WholeName())
		theirs := card.on && !card.ours
		if _, err := p.ModeOff(p.ctx, g.GPU); err != nil {
			w.breaks("the MIG mode of %s is not turned off: %v", card.name(), err)
		}
		if card.on && card.ours && len(card.instances) == 0 {
			w.breaks("%s is left in MIG mode, which the plugin turned on", card.name())
		}
		if theirs && !card.on {
			w.breaks("the MIG mode of %s was turned off, which an admin uses", card.name())
		}
	}
}

// hadAgain makes sure that a GPU can be prepared, as a whole and in part.
func (w *world) hadAgain(ctx context.Context, p *process, gpu string) {
	for _, t := range templates {
		if t.name != "partition" && t.name != "whole" {
			continue
		}
		c := &claim{name: "again", uid: types.UID(fmt.Sprintf("uid-again-%s", gpu))}
		c.allocate(t, []string{gpu})
		if _, err := p.Prepare(ctx, c.now); err != nil {
			w.breaks("%s cannot be had again as %s: %v", gpu, t.name, err)
		} else if err := w.promised(c.now); err != nil {
			w.breaks("%s cannot be had again as %s: %v", gpu, t.name, err)
		}
		if err := p.Unprepare(ctx, c.uid); err != nil {
			w.breaks("%s cannot be given back: %v", gpu, err)
		}
		w.scan()
	}
}
