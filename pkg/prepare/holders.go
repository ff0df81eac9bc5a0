package prepare

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// free refuses devices that cannot be had beside what other claims hold. The caller holds their GPUs' locks.
func (p *Preparer) free(c *resourceapi.ResourceClaim, w *plan) error {
	entries, err := p.Records.ListAbout(w.record.GPUs()...)
	if err != nil {
		return because(CauseRecord, "%w", err)
	}
	for i, d := range w.record.Devices {
		if d.AdminAccess {
			continue
		}
		for _, e := range entries {
			if e.ClaimUID == c.UID {
				continue
			}
			if err := p.sharedOtherwise(d, e); err != nil {
				return err
			}
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

// sharedOtherwise refuses a fraction beside plain shares of the same device, and the other way round: what keeps limits lets nobody else compute. The scheduler
// gives out both only where what is offered has changed while claims held the device.
func (p *Preparer) sharedOtherwise(d checkpoint.Device, e checkpoint.Entry) error {
	name, ok := device.ParseName(d.Device)
	if !ok || !name.Share || !e.Inexact() && !slices.Contains(e.Devices, d.Device) {
		return nil
	}
	refusal := &HeldError{Request: d.Request, Device: d.Device, GPU: d.GPU, UID: e.ClaimUID, Otherwise: true}
	holder, found, err := p.Records.Load(e.ClaimUID)
	if err != nil {
		h, _, herr := p.Records.Holder(sharedKey(d.Device, mpsDaemonKind))
		if herr == nil && h.Holds(e.ClaimUID) == d.Fraction {
			return nil
		}
		refusal.Unreadable = err
		return because(CauseHeld, "%w", refusal)
	}
	if !found || !slices.ContainsFunc(holder.Devices, func(h checkpoint.Device) bool {
		return h.Device == d.Device && !h.AdminAccess && h.Fraction != d.Fraction
	}) {
		return nil
	}
	refusal.Holder, refusal.Leaving = holder.Namespace+"/"+holder.Name, holder.State == checkpoint.Reverting
	return because(CauseHeld, "%w", refusal)
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
