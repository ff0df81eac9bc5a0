package schedules

import (
	"context"
	"errors"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

var errKept = errors.New("the claim keeps what it holds")

// giveBackGone is what the plugin does by itself with claims that were deleted or freed behind the kubelet's back: it asks the API server, and once more while
// no call works on the claim, and gives back what no container uses. Package driver does the same, after a grace time.
func (p *process) giveBackGone(ctx context.Context) error {
	claims, err := p.Prepared()
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range claims {
		r, found, err := p.Holding(c.UID)
		if err != nil || !found {
			errs = append(errs, err)
			continue
		}
		now, err := p.lookup(ctx, c.Name)
		if err != nil || p.Abandoned(r, now) == "" {
			errs = append(errs, err)
			continue
		}
		p.gone = c.UID
		if err := p.foundGone(ctx); err != nil {
			errs = append(errs, err)
			continue
		}
		done, err := p.GiveBack(ctx, c.UID, func(ctx context.Context, r checkpoint.Record) error {
			now, err := p.lookup(ctx, r.Name)
			if err == nil && (p.Abandoned(r, now) == "" || p.world.uses(r)) {
				err = errKept
			}
			return err
		})
		if done && !p.dead.Load() {
			p.world.note("claim %s (UID %s) is gone, and what it held is given back", c.Name, c.UID)
			p.world.gone(c.UID)
		}
		if !errors.Is(err, errKept) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (p *process) lookup(ctx context.Context, name string) (*resourceapi.ResourceClaim, error) {
	now, err := p.reread(ctx, "", name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return now, err
}

// uses says whether containers have what the record holds, or could start with it: those of a claim that the kubelet knows as prepared.
func (w *world) uses(r checkpoint.Record) bool {
	return slices.ContainsFunc(w.claims, func(c *claim) bool { return c.uid == r.ClaimUID && c.phase == prepared })
}

// noneGone looks at what must hold after claims that are gone were looked for, where nothing went wrong: each record is of a claim as the API server has it.
func (w *world) noneGone() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.breaks("open the state: %v", err)
		return
	}
	entries, err := store.List()
	if err != nil {
		w.breaks("list the records: %v", err)
	}
	for _, e := range entries {
		r, found, err := store.Load(e.ClaimUID)
		if err != nil || !found {
			continue // of one that cannot be read nothing can be told
		}
		if now := w.inAPI(r.Name); now == nil || now.UID != r.ClaimUID || !stillAllocated(r, now) {
			w.breaks("claim %s (UID %s) is gone, and still holds %v", r.Name, r.ClaimUID, r.Devices)
		}
	}
}

// stillAllocated says whether the claim has all that the record holds. In which way, and what else, the next Prepare sees to.
func stillAllocated(r checkpoint.Record, now *resourceapi.ResourceClaim) bool {
	return !slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool {
		return !slices.ContainsFunc(results(now), func(a result) bool {
			a.AdminAccess = &d.AdminAccess
			return sameAs(d, a)
		})
	})
}

// canBePrepared makes sure that every claim that a Pod waits for gets its devices, where everything works, nobody else has them, and what everyone holds is
// known.
func (w *world) canBePrepared(p *process) {
	for _, c := range w.claims {
		if w.blind || !c.isReserved() || !w.available(c) {
			continue
		}
		if _, err := p.Prepare(p.ctx, c.now); err != nil {
			w.breaks("claim %s cannot be prepared, though everything works: %v", c.name, err)
		} else if err := w.promised(c.now); err != nil {
			w.breaks("claim %s was said to be prepared: %v", c.name, err)
		}
		w.scan()
	}
}

// available says whether nothing else keeps the claim from its devices: no admin, who may cut a card again or not, no lost GPU, no claim that was allocated the
// same.
func (w *world) available(c *claim) bool {
	for _, r := range results(c.now) {
		name, ok := device.ParseName(r.Device)
		g := w.gpu(name.GPU)
		if !ok || g == nil || g.lost || g.recut || len(g.theirs) > 0 {
			return false
		}
	}
	var others []*resourceapi.ResourceClaim
	for _, o := range w.claims {
		if o == c {
			continue
		}
		if w.conflict(c.now, o.now) != "" || disagree(c.now, o.now) {
			return false
		}
		others = append(others, o.now)
	}
	return w.overfull(c.now, others) == ""
}
