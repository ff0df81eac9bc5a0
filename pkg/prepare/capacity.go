package prepare

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
)

// FullError refuses shares that do not fit into what other claims leave of a device's capacity.
type FullError struct {
	Request string
	Device  string
	// Capacity is the name of what is short: claims can hold Total of it, and the holders have Held.
	Capacity           string
	Asked, Held, Total resource.Quantity
	// Holders is empty where the claim alone asks for more than there is.
	Holders []checkpoint.HolderClaim
}

func (e *FullError) Error() string {
	asked := fmt.Sprintf("request %s: the claim asks for %s of capacity %s of device %s, which has %s", e.Request, e.Asked.String(), e.Capacity, e.Device, e.Total.String())
	if len(e.Holders) == 0 {
		return asked + ": delete the claim's Pods, so that it is allocated anew"
	}
	names := make([]string, len(e.Holders))
	for i, h := range e.Holders {
		names[i] = h.String()
	}
	return fmt.Sprintf("%s, and other claims hold %s: wait until enough of these claims are given back on this node, or end their Pods: %s", asked, e.Held.String(), strings.Join(names, ", "))
}

func (e *FullError) until() []waitedFor {
	holders := make([]waitedFor, len(e.Holders))
	for i, h := range e.Holders {
		holders[i] = waitedFor{h.UID, h.Namespace + "/" + h.Name}
	}
	return holders
}

// fits refuses the i-th device's shares if they exceed its capacity together with those that other
// claims hold. The scheduler counts too, but a Pod that is deleted by force frees its share while it
// still runs. The caller holds the GPU's lock.
func (w *plan) fits(i int, holders []checkpoint.Record) error {
	d := w.record.Devices[i]
	asked := consumed(w.record, d.Device)
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		total, known := w.wants[i].totals[name]
		if !known {
			continue
		}
		full := &FullError{Request: d.Request, Device: d.Device, Capacity: name, Asked: asked[name], Total: total}
		for _, h := range holders {
			if q, takes := consumed(h, d.Device)[name]; takes {
				full.Held.Add(q)
				full.Holders = append(full.Holders, checkpoint.HolderClaim{UID: h.ClaimUID, Namespace: h.Namespace, Name: h.Name})
			}
		}
		sum := full.Held.DeepCopy()
		sum.Add(full.Asked)
		switch {
		case sum.Cmp(total) <= 0:
		case len(full.Holders) == 0:
			return because(CauseClaim, "%w", full)
		default:
			return because(CauseHeld, "%w", full)
		}
	}
	return nil
}

// capacity is by name. What is nothing is left out.
type capacity map[string]resource.Quantity

func (c capacity) add(more capacity) {
	for name, q := range more {
		if q.Sign() > 0 {
			sum := c[name].DeepCopy()
			sum.Add(q)
			c[name] = sum
		}
	}
}

// consumed adds up what the claim takes of the device, over all of its shares.
func consumed(r checkpoint.Record, deviceName string) capacity {
	sum := capacity{}
	for _, d := range r.Devices {
		if d.Device == deviceName && !d.AdminAccess {
			sum.add(d.ConsumedCapacity)
		}
	}
	return sum
}

// sameCapacity accepts a record that does not say what its shares consume.
func sameCapacity(old, now capacity) bool {
	return old == nil || maps.EqualFunc(old, now, func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
}
