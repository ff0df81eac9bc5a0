package prepare

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// CapacityError refuses a claim whose shares do not fit into what other claims leave of a device's
// capacity.
type CapacityError struct {
	Request string
	Device  string
	// Capacity names the exceeded capacity. Total is how much of it the device has, Requested is what
	// this claim asks for, and InUse is what the claims in Holders use.
	Capacity                string
	Requested, InUse, Total resource.Quantity
	// Holders are the other claims that use some of the capacity. Holders is empty if this claim alone
	// asks for more than Total.
	Holders []checkpoint.HolderClaim
}

func (e *CapacityError) Error() string {
	asked := fmt.Sprintf("request %s: the claim asks for %s of capacity %s of device %s, which has %s",
		e.Request, e.Requested.String(), e.Capacity, e.Device, e.Total.String())
	if len(e.Holders) == 0 {
		return asked + ": delete the claim's Pods to have it allocated anew"
	}
	names := make([]string, len(e.Holders))
	for i, h := range e.Holders {
		names[i] = h.String()
	}
	return fmt.Sprintf("%s, and other claims use %s: wait until the Pods of enough of these claims have ended, or delete them: %s",
		asked, e.InUse.String(), strings.Join(names, ", "))
}

func (e *CapacityError) blockers() []checkpoint.HolderClaim { return e.Holders }

// checkCapacity returns an error if device i has too little capacity for this claim's shares and
// those of the claims in holders. The scheduler checks this too, but regards a share as free once
// its Pod was deleted by force, even if the Pod still runs. The caller holds the GPU's lock.
func (pl *plan) checkCapacity(i int, holders []checkpoint.Record) error {
	d := pl.record.Devices[i]
	asked := consumedBy(pl.record, d.Device)
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		total, known := pl.requests[i].totals[name]
		if !known {
			continue
		}
		full := &CapacityError{Request: d.Request, Device: d.Device, Capacity: name, Requested: asked[name], Total: total}
		for _, h := range holders {
			if q, takes := consumedBy(h, d.Device)[name]; takes {
				full.InUse.Add(q)
				full.Holders = append(full.Holders, holderClaim(h))
			}
		}
		sum := full.InUse.DeepCopy()
		sum.Add(full.Requested)
		switch {
		case sum.Cmp(total) <= 0:
		case len(full.Holders) == 0:
			return cause.Wrap(cause.Claim, full)
		default:
			return cause.Wrap(cause.Held, full)
		}
	}
	return nil
}

// consumedBy returns how much of each capacity of the device all shares of the record's claim
// consume together. It has only amounts above zero.
func consumedBy(r checkpoint.Record, deviceName string) map[string]resource.Quantity {
	consumed := map[string]resource.Quantity{}
	for _, d := range r.Devices {
		if d.Device != deviceName || d.AdminAccess {
			continue
		}
		for name, q := range d.ConsumedCapacity {
			if q.Sign() > 0 {
				sum := consumed[name].DeepCopy()
				sum.Add(q)
				consumed[name] = sum
			}
		}
	}
	return consumed
}
