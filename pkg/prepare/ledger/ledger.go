// Package ledger answers questions about the claims' records: which claims are prepared, which
// devices they have, and which MIG instances this driver created.
//
// It only reads. It takes no locks and reads no hardware, so an answer may be out of date.
package ledger

import (
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Inventory is the inventory of the node's GPUs.
type Inventory interface{ Snapshot() inventory.Snapshot }

// Ledger answers questions about the records.
type Ledger struct {
	records   *checkpoint.Store
	bootID    string
	inventory Inventory
}

// New returns a Ledger. Only [Ledger.PreparedDevices] needs the inventory.
func New(records *checkpoint.Store, bootID string, inventory Inventory) *Ledger {
	return &Ledger{records, bootID, inventory}
}

// AllocatedDevices returns the devices that claims have, with the UIDs of the claims.
func (l *Ledger) AllocatedDevices() (device.Allocations, error) {
	entries, err := l.records.List()
	if err != nil {
		return device.Allocations{}, cause.Wrap(cause.Record, err)
	}
	exclusive, shared := map[string]string{}, map[string]bool{}
	isNew := func(name string) bool {
		n, ok := device.ParseName(name)
		_, known := shared[name]
		return ok && n.Share && !known
	}
	for _, e := range entries {
		for _, d := range e.Devices {
			if n, ok := device.ParseName(d); ok && !n.Share {
				exclusive[d] = string(e.ClaimUID)
			}
		}
		if !slices.ContainsFunc(e.Devices, isNew) {
			continue // one claim suffices: all claims on a device have the same kind of share
		}
		r, _, err := l.records.Load(e.ClaimUID)
		if err != nil {
			for _, name := range e.Devices {
				if isNew(name) {
					_, fraction, err := l.records.Holder(steps.SharedKey(name, steps.MPSDaemonKind))
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
	return device.Allocations{Exclusive: exclusive, Shared: shared}, nil
}

// Usage is the number of claims with a record, the number of GPUs of which these claims use all or
// a part, and the number of their partitions.
type Usage struct{ Claims, GPUs, Partitions int }

// Usage counts the claims and their devices. Devices that are unknown do not count.
func (l *Ledger) Usage() (Usage, error) {
	entries, err := l.records.List()
	if err != nil {
		return Usage{}, cause.Wrap(cause.Record, err)
	}
	h := Usage{Claims: len(entries)}
	gpus := map[string]bool{}
	for _, e := range entries {
		for _, d := range e.Devices {
			name, ok := device.ParseName(d)
			if !ok {
				continue // a later version of the driver wrote this device name
			}
			gpus[name.GPU] = true
			if name.Partition != nil {
				h.Partitions++
			}
		}
	}
	h.GPUs = len(gpus)
	return h, nil
}

// InUse reports whether a claim uses the GPU or a part of it. An unreadable record that may name
// the GPU counts as use.
func (l *Ledger) InUse(gpu string) (bool, error) {
	return l.inUse(gpu, func(string) bool { return true })
}

// InUseByContainers is like InUse, but a virtual machine that has the GPU does not count. A record
// of an earlier boot does: its claim gets the same device again.
func (l *Ledger) InUseByContainers(gpu string) (bool, error) {
	return l.inUse(gpu, func(name string) bool {
		n, known := device.ParseName(name)
		return !known || !n.Passthrough
	})
}

// inUse reports whether a claim has a device of the GPU for which the function counts returns true.
func (l *Ledger) inUse(gpu string, counts func(name string) bool) (bool, error) {
	entries, err := l.records.List()
	if err != nil {
		return false, cause.Wrap(cause.Record, err)
	}
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool {
		return e.Inexact ||
			slices.ContainsFunc(e.Devices, func(d string) bool { return (d == gpu || strings.HasPrefix(d, gpu+"-")) && counts(d) })
	}), nil
}
