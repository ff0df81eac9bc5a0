package prepare

import (
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// devicesOf returns the devices of the claim with record e. It takes them from the record's file
// name, and reads the record only if the file name does not list them.
func (p *Preparer) devicesOf(e checkpoint.Entry) []string {
	if e.Inexact() {
		if r, found, err := p.Records.Load(e.ClaimUID); err == nil && found {
			return r.OccupiedDevices()
		}
	}
	return e.Devices
}

// ExclusiveDevices returns the devices that are not shared. It maps each device's name to the UID
// of the claim that uses the device.
func (p *Preparer) ExclusiveDevices() (map[string]string, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	exclusive := map[string]string{}
	for _, e := range entries {
		for _, d := range p.devicesOf(e) {
			if n, ok := device.ParseName(d); ok && !n.Share {
				exclusive[d] = string(e.ClaimUID)
			}
		}
	}
	return exclusive, nil
}

// SharedDevices returns the devices of which claims have shares. The value is true if the shares
// have limits on memory and compute, and false if they have none.
func (p *Preparer) SharedDevices() (map[string]bool, error) {
	entries, err := p.Records.List()
	if err != nil {
		return nil, cause.Wrap(cause.Record, err)
	}
	shared := map[string]bool{}
	isNew := func(name string) bool {
		n, ok := device.ParseName(name)
		_, known := shared[name]
		return ok && n.Share && !known
	}
	for _, e := range entries {
		if !e.Inexact() && !slices.ContainsFunc(e.Devices, isNew) {
			continue // one claim suffices: all claims on a device have the same kind of share
		}
		r, _, err := p.Records.Load(e.ClaimUID)
		if err != nil {
			for _, name := range e.Devices {
				if isNew(name) {
					_, fraction, err := p.Records.Holder(steps.SharedKey(name, steps.MPSDaemonKind))
					shared[name] = fraction || err != nil
				}
			}
			continue
		}
		for _, d := range r.Devices {
			if !d.AdminAccess && isNew(d.Device) {
				shared[d.Device] = d.Fraction
			}
		}
	}
	return shared, nil
}
