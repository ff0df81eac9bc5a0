package prepare

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// free refuses devices that cannot be had beside what other claims hold. The caller holds their GPUs' locks.
// had says that the claim has held the same devices until now.
func (p *Preparer) free(c *resourceapi.ResourceClaim, w *plan, had bool) error {
	entries, err := p.Records.ListAbout(w.record.GPUs()...)
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	others := slices.DeleteFunc(entries, func(e checkpoint.Entry) bool { return e.ClaimUID == c.UID })
	for i, d := range w.record.Devices {
		if d.AdminAccess {
			continue
		}
		if err := p.shareable(w, i, others, had); err != nil {
			return err
		}
		for _, e := range others {
			there, excluded := excluding(w.wants[i], e.Devices)
			if !excluded && !e.Inexact() {
				continue
			}
			refusal := &HeldError{Request: d.Request, Device: d.Device, GPU: d.GPU, UID: e.ClaimUID, Holds: there}
			holder, found, err := p.Records.Load(e.ClaimUID)
			if err == nil && e.Inexact() {
				if refusal.Holds, excluded = excluding(w.wants[i], holder.Holds()); !excluded {
					continue
				}
			}
			if err != nil {
				refusal.Unreadable = err
			} else if found {
				refusal.Holder = holder.Namespace + "/" + holder.Name
				refusal.Leaving = holder.State == checkpoint.Reverting
			}
			return because(CauseHeld, "%w", refusal)
		}
	}
	return nil
}

// shareable refuses a share that cannot be had together with those that other claims hold of the
// device. What the claim has held until now is not measured again: it fitted when it was given.
func (p *Preparer) shareable(w *plan, i int, others []checkpoint.Entry, had bool) error {
	d := w.record.Devices[i]
	if !w.wants[i].name.Share {
		return nil
	}
	var holders []checkpoint.Record
	for _, e := range others {
		if !e.Inexact() && !slices.Contains(e.Devices, d.Device) {
			continue
		}
		holder, found, err := p.Records.Load(e.ClaimUID)
		switch {
		case err != nil:
			if err := p.unmeasured(d, e.ClaimUID, err, had); err != nil {
				return err
			}
		case found && sharedOtherwise(d, holder):
			return because(CauseHeld, "%w", &HeldError{
				Request: d.Request, Device: d.Device, GPU: d.GPU, UID: e.ClaimUID, Otherwise: true,
				Holder: holder.Namespace + "/" + holder.Name, Leaving: holder.State == checkpoint.Reverting,
			})
		case found:
			holders = append(holders, holder)
		}
	}
	if had {
		return nil
	}
	return w.fits(i, holders)
}

// unmeasured refuses a share of a device of which a claim holds nobody knows how much, because its
// record cannot be read. A claim that has its share keeps it, unless the other shares the device in
// another way.
func (p *Preparer) unmeasured(d checkpoint.Device, uid types.UID, unreadable error, had bool) error {
	h, _, err := p.Records.Holder(sharedKey(d.Device, mpsDaemonKind))
	alike := err == nil && h.Holds(uid) == d.Fraction
	if alike && had {
		return nil
	}
	return because(CauseHeld, "%w", &HeldError{
		Request: d.Request, Device: d.Device, GPU: d.GPU, UID: uid, Otherwise: !alike, Unreadable: unreadable,
	})
}

// sharedOtherwise says whether the claim has fractions of the device where plain shares are asked
// for, or the other way round: what keeps limits lets nobody else compute. The scheduler gives out
// both only where what is offered has changed while claims held the device.
func sharedOtherwise(d checkpoint.Device, holder checkpoint.Record) bool {
	return slices.ContainsFunc(holder.Devices, func(h checkpoint.Device) bool {
		return h.Device == d.Device && !h.AdminAccess && h.Fraction != d.Fraction
	})
}

// excluding finds among devices that are held one that cannot be held beside the wanted one. Of a shape that only a later version knows it is taken for
// granted that it takes its whole GPU.
func excluding(t want, held []string) (string, bool) {
	i := slices.IndexFunc(held, func(h string) bool {
		name, known := device.ParseName(h)
		if !known {
			return h == t.name.GPU || strings.HasPrefix(h, t.name.GPU+"-")
		}
		return name.GPU == t.name.GPU && device.Conflict(t.name, name, t.gpu)
	})
	if i < 0 {
		return "", false
	}
	return held[i], true
}
