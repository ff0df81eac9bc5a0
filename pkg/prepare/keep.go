package prepare

import (
	"context"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// keep looks at an earlier preparation of the claim: one that is finished and for the same allocation is verified, mended and kept.
// Any other is reverted. Without devices of ours there is nothing to keep.
func (p *Preparer) keep(ctx context.Context, old checkpoint.Record, w *plan) (kept bool, err error) {
	logger := klog.FromContext(ctx)
	if old.State != checkpoint.Prepared || len(w.record.Devices) == 0 || !slices.EqualFunc(old.Devices, w.record.Devices, sameDevice) {
		logger.Info("Reverting an earlier preparation of the claim", "state", old.State, "devices", deviceNames(old.Devices))
		return false, p.revertEarlier(ctx, old)
	}
	for i, d := range old.Devices {
		if now := w.record.Devices[i]; now.GPUUUID != d.GPUUUID {
			return false, replaced(d, now.GPUUUID)
		}
	}
	if (w.partitioned() || sharesSteps(old)) && old.BootID != p.BootID {
		if err := p.madeAgain(ctx, old, w); err != nil {
			return false, err
		}
		logger.Info("Preparing the claim anew: the node was started again, and what was cut is gone", "devices", deviceNames(old.Devices))
		return false, p.revertEarlier(ctx, old)
	}
	asked := w.sharing
	known, err := p.adopt(w, old)
	if err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	if known && !w.sharesAs(asked) {
		logger.Info("Preparing the claim anew: it wants its devices to be shared in another way than before", "devices", deviceNames(old.Devices))
		return false, p.revertEarlier(ctx, old)
	}
	if !known {
		// Made by another version of the driver. Nothing that it did may be forgotten: what this version cannot revert, it refuses here by name.
		logger.Info("Preparing the claim anew: an earlier preparation took other steps")
		return false, p.revertEarlier(ctx, old)
	}
	// What is answered stands on a record that another process may have been killed in writing.
	if err := p.Records.Settle(sharesSteps(old)); err != nil {
		return false, because(CauseRecord, "%w", err)
	}
	if err := p.verify(w); err != nil {
		return false, err
	}
	work, cancel := within(ctx, callTime, answerTime)
	defer cancel()
	env := p.env(&old, nil)
	modes, err := p.wholes(work, env.Looks, w)
	if err != nil {
		return false, err
	}
	if err := applyAll(work, env, modes); err != nil {
		return false, stepError(err)
	}
	return true, p.refresh(work, old, w, p.held)
}

// revertEarlier gives back what an earlier preparation has, so that the claim is prepared anew. What was said
// of its devices ends with it.
func (p *Preparer) revertEarlier(ctx context.Context, old checkpoint.Record) error {
	if err := p.revert(ctx, old); err != nil {
		return err
	}
	p.GivenBack(old.ClaimUID)
	return nil
}

// madeAgain waits, after a reboot, for whoever made the partitions that the claim uses as they are: at such a place nothing is cut in their stead.
func (p *Preparer) madeAgain(ctx context.Context, old checkpoint.Record, w *plan) error {
	steps, err := restore(old.Steps)
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	ours := map[string]bool{}
	for _, step := range steps {
		switch s := step.(type) {
		case *migInstance:
			ours[s.Device] = true
		case *shared:
			if part, ok := s.part(); ok {
				ours[part] = true
			}
		}
	}
	work, cancel := within(ctx, callTime, answerTime)
	defer cancel()
	looks := newLooks(p.Partitions)
	for i, d := range old.Devices {
		t := &w.wants[i]
		if t.name.Partition == nil || d.AdminAccess || ours[d.Device] {
			continue
		}
		if _, _, there, err := p.at(work, looks, t); err != nil {
			return because(CauseOf(err), "request %s: %w", d.Request, err)
		} else if !there {
			return because(CauseNotReady, "request %s: device %s was made by someone else, and the node was started since: it is used when it has been made again; or delete the claim's Pods to have another allocated",
				d.Request, d.Device)
		}
	}
	return nil
}

// adopt makes the steps of the record those of the plan. It is false for steps that this version would not have taken for these devices.
func (p *Preparer) adopt(w *plan, old checkpoint.Record) (bool, error) {
	steps, err := restore(old.Steps)
	if err != nil {
		return false, err
	}
	specs := 0
	cuts := map[string]*migInstance{}
	parts := map[string]*shared{}
	w.steps = nil
	for _, step := range steps {
		switch s := step.(type) {
		case *claimSpec:
			w.spec = s
			specs++
		case *migInstance:
			cuts[s.Device] = s
			w.steps = append(w.steps, s)
		case *shared:
			if s.Want.Kind == migInstanceKind {
				if s.held, err = s.load(p.Records, p.BootID); err != nil {
					return false, s.unreadable(err)
				}
				parts[s.Key] = s
			}
			w.steps = append(w.steps, s)
		}
	}
	used := map[string]bool{}
	for i := range w.wants {
		t, d := &w.wants[i], old.Devices[i]
		w.record.Devices[i].MIGUUID = d.MIGUUID
		t.cut, t.shared = cuts[d.Device], nil
		if t.name.Share {
			t.shared = parts[partKey(t.name)]
		}
		if (t.cut != nil || t.shared != nil) && !d.AdminAccess {
			used[d.Device] = true
		}
	}
	return specs == 1 && len(used) == len(cuts)+len(parts), nil
}

// refresh brings what a finished preparation left up to date: the partitions, by ensure, then the spec, then the record where it says something else.
func (p *Preparer) refresh(ctx context.Context, old checkpoint.Record, w *plan, ensure ensure) error {
	r := old
	r.Devices = slices.Clone(old.Devices)
	env := p.env(&r, w.all())
	env.UUID = w.uuid
	if w.partitioned() || len(sharedSteps(w.steps)) > 0 {
		if err := ensure(ctx, env, w); err != nil {
			return err
		}
	}
	if err := p.finish(ctx, env, w); err != nil {
		return stepError(err)
	}
	stored, err := store(w.all(), r.Steps)
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	// What is on record now is what making a partition again has journalled, if that was needed.
	changed, others := r.BootID != p.BootID || !slices.EqualFunc(r.Steps, stored, sameStep), false
	for i := range r.Devices {
		if now := w.record.Devices[i].MIGUUID; r.Devices[i].MIGUUID != now {
			r.Devices[i].MIGUUID, changed, others = now, true, true
		}
	}
	if !changed {
		return nil
	}
	if err := p.settle(r, w); err != nil {
		return err
	}
	if others {
		p.Changed(ctx, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, UID: r.ClaimUID})
	}
	return nil
}

// sharesAs says whether the plan, as a record gave it, shares its devices as the claim asks.
func (w *plan) sharesAs(asked *sharing) bool {
	var there []*shared
	for _, s := range sharedSteps(w.steps) {
		if s.Want.Kind != migInstanceKind {
			there = append(there, s)
		}
	}
	return slices.EqualFunc(there, asked.steps(), sameWant) && slices.EqualFunc(w.spec.Clients, asked.clients, sameClient)
}

// sameClient leaves out what the claim does not ask for: whether a container can be limited as a whole is what a look at the GPU said, and the next may
// say something else, while the claim's containers run with what they were given.
func sameClient(a, b mpsClient) bool {
	a.Whole, b.Whole = "", ""
	return reflect.DeepEqual(a, b)
}

// sameWant compares what is wanted, in whichever form another version has written it.
func sameWant(a, b *shared) bool {
	x, err := a.want()
	y, errY := b.want()
	return err == nil && errY == nil && a.Key == b.Key && x.wanted() == y.wanted()
}

// sharesSteps says whether a record has steps that the claim holds together with others, or might.
func sharesSteps(r checkpoint.Record) bool {
	return slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool { return s.Kind == sharedKind })
}

func replaced(d checkpoint.Device, now string) error {
	return &lastingError{because(CauseDevice, "request %s: device %s was GPU %s when the claim was prepared and is GPU %s now: the card was replaced, delete the claim's Pods to give it back",
		d.Request, d.Device, d.GPUUUID, now)}
}

// sameDevice leaves the UUIDs out: a card that was replaced is told apart from another allocation.
func sameDevice(old, now checkpoint.Device) bool {
	return old.Request == now.Request && old.Pool == now.Pool && old.Device == now.Device && old.AdminAccess == now.AdminAccess &&
		same(old.ShareID, now.ShareID) && sameCapacity(old.ConsumedCapacity, now.ConsumedCapacity)
}

func same[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

func sameStep(a, b checkpoint.Step) bool {
	return a.Kind == b.Kind && string(a.Params) == string(b.Params)
}

func deviceNames(devices []checkpoint.Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.Device
	}
	return names
}
