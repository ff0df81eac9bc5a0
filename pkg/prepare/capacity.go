package prepare

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// checkCapacity returns an error if device i has too little memory or cores for this claim's
// fractions and those of the claims in holders. The scheduler checks this too, but regards a share
// as free once its Pod was deleted by force, even if the Pod still runs. Plain shares have no limit
// that the node must keep: a setting says how many the scheduler allocates, and may change
// meanwhile. The caller holds the GPU's lock.
func (pl *plan) checkCapacity(i int, holders []checkpoint.Record) error {
	d := pl.record.Devices[i]
	asked, totals := consumedBy(pl.record, d.Device), device.FractionTotals(pl.requests[i].gpu, pl.requests[i].name)
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		total, known := totals[name]
		if !known {
			continue
		}
		requested, inUse := asked[name], resource.Quantity{}
		var names []string
		var blockers []checkpoint.ClaimRef
		for _, h := range holders {
			if q, takes := consumedBy(h, d.Device)[name]; takes {
				inUse.Add(q)
				names = append(names, h.Claim().String())
				blockers = append(blockers, h.Claim())
			}
		}
		sum := inUse.DeepCopy()
		sum.Add(requested)
		if sum.Cmp(total) <= 0 {
			continue
		}
		problem := fmt.Sprintf("request %s: the claim asks for %s of capacity %s of device %s, which has %s",
			d.Request, requested.String(), name, d.Device, total.String())
		if len(blockers) == 0 {
			return cause.Errorf(cause.Claim, "%s: delete the claim's Pods to have it allocated anew", problem)
		}
		return &heldError{cause.Errorf(cause.Held,
			"%s, and other claims use %s: wait until the Pods of enough of these claims have ended, or delete them: %s",
			problem, inUse.String(), strings.Join(names, ", ")), blockers}
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
