package prepare

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// devicesOf are those that a claim holds. A record that cannot be read counts as far as its name
// tells.
func (p *Preparer) devicesOf(e checkpoint.Entry) []string {
	if e.Inexact() {
		if r, found, err := p.Records.Load(e.ClaimUID); err == nil && found {
			return r.Holds()
		}
	}
	return e.Devices
}

// HeldAlone are the devices that one claim holds, with the claim's UID.
func (p *Preparer) HeldAlone() (map[string]string, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, because(CauseRecord, "%w", err)
	}
	held := map[string]string{}
	for _, e := range entries {
		for _, d := range p.devicesOf(e) {
			if n, ok := device.ParseName(d); ok && !n.Share {
				held[d] = string(e.ClaimUID)
			}
		}
	}
	return held, nil
}

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
