package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// holding is what records say of one GPU's partitions.
type holding struct {
	// cuts are those that were made for claims of this boot.
	cuts []*migInstance
	// unread are places of claims whose record cannot be read: whose the instance there is cannot be proved, so it is neither an admin's nor removed.
	unread []device.PartitionName
	// unknown says that such a claim's places are not known either: what is there may all be its.
	unknown bool
	// used are the MIG devices of others that claims use as they are.
	used map[string]bool
}

// holding reads the records of the claims that hold partitions of the GPU.
func (p *Preparer) holding(gpu string) (*holding, error) {
	entries, err := p.Records.ListAbout(gpu)
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	h := &holding{used: map[string]bool{}}
	if err := p.sharedCuts(gpu, h); err != nil {
		return nil, err
	}
	for _, e := range entries {
		places := partitionsOf(gpu, e.Devices)
		if len(places) == 0 && !e.Inexact() {
			continue
		}
		r, found, err := p.Records.Load(e.ClaimUID)
		var steps []Step
		if err == nil && found && r.BootID == p.BootID {
			steps, err = restore(r.Steps)
		}
		if err != nil {
			h.unread = append(h.unread, places...)
			h.unknown = h.unknown || e.Inexact()
			continue
		}
		h.take(gpu, r, steps)
	}
	return h, nil
}

// sharedCuts adds the partitions that were made for all claims which share them.
func (p *Preparer) sharedCuts(gpu string, h *holding) error {
	keys, err := p.Records.Holders()
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	for _, key := range keys {
		of, kind := keyOf(key)
		name, ok := device.ParseName(of)
		if kind != migInstanceKind || !ok || name.GPU != gpu || name.Partition == nil {
			continue
		}
		held, found, err := p.Records.Holder(key)
		if err == nil && (!found || held.BootID != p.BootID) {
			continue
		}
		var step sharable
		if err == nil {
			step, err = sharableOf(held.Step)
		}
		if m, ok := step.(*migInstance); err == nil && ok {
			h.cuts = append(h.cuts, m)
			continue
		}
		h.unread = append(h.unread, *name.Partition)
	}
	return nil
}

func (h *holding) take(gpu string, r checkpoint.Record, steps []Step) {
	made := map[string]bool{}
	for _, step := range steps {
		switch s := step.(type) {
		case *migInstance:
			if s.GPU == gpu {
				h.cuts = append(h.cuts, s)
				made[s.Device] = true
			}
		case *shared:
			if part, ok := s.part(); ok {
				made[part] = true
			}
		}
	}
	for _, d := range r.Devices {
		if d.GPU == gpu && d.MIGUUID != "" && !made[d.Device] && !d.AdminAccess {
			h.used[d.MIGUUID] = true
		}
	}
}

func partitionsOf(gpu string, devices []string) []device.PartitionName {
	var places []device.PartitionName
	for _, d := range devices {
		if name, ok := device.ParseName(d); ok && name.GPU == gpu && name.Partition != nil {
			places = append(places, *name.Partition)
		}
	}
	return places
}

func (h *holding) explains(in device.Instance) bool {
	return h.unknown || slices.ContainsFunc(h.cuts, func(s *migInstance) bool { return s.explains(in) }) ||
		slices.ContainsFunc(h.unread, func(place device.PartitionName) bool {
			return place.Compute == nil && place.ProfileID == in.ProfileID && place.Start == in.Placement.Start
		})
}

func (h *holding) uses(in device.Instance) bool {
	return slices.ContainsFunc(in.Compute, func(c device.ComputeInstance) bool { return h.used[c.UUID] })
}

// Explained is the part of a GPU's instances that was made for claims, as records prove it. It asks no hardware: for instances that were seen before the
// records were read, it may leave out what was ours and is removed since; see [Preparer.Foreign].
func (p *Preparer) Explained(gpu string, instances []device.Instance) ([]device.Instance, error) {
	h, err := p.holding(gpu)
	if err != nil {
		return nil, err
	}
	var ours []device.Instance
	for _, in := range instances {
		if h.explains(in) {
			ours = append(ours, in)
		}
	}
	return ours, nil
}

// Foreign asks the hardware, while no claim is being prepared on the GPU, what is there, and says what of it no record explains.
func (p *Preparer) Foreign(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance, err error) {
	instances, foreign, _, release, err := p.foreign(ctx, card, gpu)
	if err != nil {
		return nil, nil, err
	}
	release()
	return instances, foreign, nil
}

func (p *Preparer) foreign(ctx context.Context, card device.Card, gpu string) (instances, foreign []device.Instance, h *holding, release func(), err error) {
	held, err := p.Locks.Acquire(ctx, gpuLocks(gpu)...)
	if err != nil {
		return nil, nil, nil, nil, notLocked("a claim is being prepared or unprepared on the GPU", err)
	}
	state, err := p.Partitions.Look(ctx, card)
	if err == nil {
		h, err = p.holding(gpu)
	}
	if err != nil {
		held.Release()
		return nil, nil, nil, nil, stepError(err)
	}
	for _, in := range state.MIG.Instances {
		if !h.explains(in) {
			foreign = append(foreign, in)
		}
	}
	return state.MIG.Instances, foreign, h, held.Release, nil
}

// Adopt removes, on an admin's word, the instances of a GPU that no record explains and that no claim uses. One that is in use by others stays, and is an
// error.
func (p *Preparer) Adopt(ctx context.Context, card device.Card, gpu string) error {
	work, cancel := within(ctx, roundTime, 0)
	defer cancel()
	_, foreign, h, release, err := p.foreign(work, card, gpu)
	if err != nil {
		return err
	}
	defer release()
	var errs []error
	for _, in := range foreign {
		if h.uses(in) {
			continue
		}
		if err := p.Partitions.Destroy(work, card, in); err != nil {
			errs = append(errs, fmt.Errorf("remove %s, which was handed over, from %s: %w", describe(in), gpu, err))
			continue
		}
		klog.FromContext(ctx).Info("Removed an instance that was handed over", "gpu", gpu, "instance", describe(in))
	}
	if err := errors.Join(errs...); err != nil {
		return stepError(err)
	}
	return nil
}
