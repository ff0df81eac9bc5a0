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

var errStillUsed = errors.New("the claim is still used")

// collectClaims unprepares claims that were deleted or deallocated without the kubelet. If the API
// server no longer has a claim, it asks again while no call can change the claim, and keeps a claim
// that a container uses. Package driver does the same after a grace time.
func (p *process) collectClaims(ctx context.Context) error {
	claims, err := p.PreparedClaims()
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range claims {
		now, err := p.lookup(ctx, r.Name)
		if err != nil || p.OrphanReason(r, now) == "" {
			errs = append(errs, err)
			continue
		}
		p.orphan = r.ClaimUID
		if err := p.foundGone(ctx); err != nil {
			errs = append(errs, err)
			continue
		}
		done, err := p.UnprepareOrphan(ctx, r.ClaimUID, func(ctx context.Context, r checkpoint.Record) error {
			now, err := p.lookup(ctx, r.Name)
			if err == nil && (p.OrphanReason(r, now) == "" || p.world.isUsed(r)) {
				err = errStillUsed
			}
			return err
		})
		if done && !p.dead.Load() {
			p.world.note("orphaned claim %s (UID %s) is unprepared", r.Name, r.ClaimUID)
			p.world.checkUnprepared(r.ClaimUID)
		}
		if !errors.Is(err, errStillUsed) {
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

// isUsed reports whether the kubelet considers the claim of checkpoint record r prepared. Only then
// can containers use the claim's devices or start with them.
func (w *world) isUsed(r checkpoint.Record) bool {
	return slices.ContainsFunc(w.claims, func(c *claim) bool { return c.uid == r.ClaimUID && c.phase == prepared })
}

// checkNoOrphans adds a violation if a claim's checkpoint record is left although the API server
// has no such allocated claim. It is called after a garbage collection that no fault interrupted.
func (w *world) checkNoOrphans() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.violates("open the state: %v", err)
		return
	}
	entries, err := store.List()
	if err != nil {
		w.violates("list the records: %v", err)
	}
	for _, e := range entries {
		r, found, err := store.Load(e.ClaimUID)
		if err != nil || !found {
			continue // an unreadable record does not name its claim
		}
		if now := w.apiClaim(r.Name); now == nil || now.UID != r.ClaimUID || !stillAllocated(r, now) {
			w.violates("claim %s (UID %s) is orphaned, and still holds %v", r.Name, r.ClaimUID, r.Devices)
		}
	}
}

// stillAllocated reports whether every device in the claim's checkpoint record is still allocated
// to the claim. If they differ in other ways, the result is true, because the claim's next Prepare
// corrects the record.
func stillAllocated(r checkpoint.Record, now *resourceapi.ResourceClaim) bool {
	return !slices.ContainsFunc(r.Devices, func(d checkpoint.Device) bool {
		return !slices.ContainsFunc(results(now), func(a result) bool { return sameAs(d, a) })
	})
}

// checkPreparable prepares every reserved claim without faults, and adds a violation if that fails.
// It skips claims whose devices another claim or an admin has, and does nothing if a state file was
// unreadable.
func (w *world) checkPreparable(p *process) {
	for _, c := range w.claims {
		if w.stateUnreadable || !c.isReserved() || !w.available(c) {
			continue
		}
		if _, err := p.Prepare(p.ctx, c.now); err != nil {
			w.violates("claim %s cannot be prepared without a fault: %v", c.name, err)
		} else if err := w.usable(c.now); err != nil {
			w.violates("Prepare of claim %s succeeded, but its containers lack something: %v", c.name, err)
		}
		w.scan()
	}
}

// available reports whether claim c can have its devices. A lost GPU, an admin's MIG instances, or
// another claim for the same hardware or memory prevent that.
func (w *world) available(c *claim) bool {
	for _, r := range results(c.now) {
		name, ok := device.ParseName(r.Device)
		g := w.gpu(name.GPU)
		if !ok || g == nil || g.lost || g.restoredAtBoot || len(g.adminInstances) > 0 ||
			g.isAway() && !name.Passthrough { // another claim has it, which admin access allows
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
