package prepare

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// HeldShares are the devices of which claims hold shares, and whether these are fractions.
func (p *Preparer) HeldShares() (map[string]bool, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	held := map[string]bool{}
	isNew := func(name string) bool {
		n, ok := device.ParseName(name)
		_, known := held[name]
		return ok && n.Share && !known
	}
	for _, e := range entries {
		if !e.Inexact() && !slices.ContainsFunc(e.Devices, isNew) {
			continue // the same device is held by all of them in the same way
		}
		r, _, err := p.Records.Load(e.ClaimUID)
		if err != nil {
			for _, name := range e.Devices {
				if isNew(name) {
					_, fraction, err := p.Records.Holder(sharedKey(name, mpsDaemonKind))
					held[name] = fraction || err != nil
				}
			}
			continue
		}
		for _, d := range r.Devices {
			if !d.AdminAccess && isNew(d.Device) {
				held[d.Device] = d.Fraction
			}
		}
	}
	return held, nil
}
