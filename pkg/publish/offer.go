package publish

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// offer has slices without new taints, and what they were built from. Its slices are never
// modified.
type offer struct {
	slices []resourceslice.Slice
	// adopted is true for the slices of an earlier plugin instance, which keep their taints.
	adopted bool
	// snapshot is what the slices were built from. Adopted slices have none until the hardware is
	// known.
	snapshot inventory.Snapshot
	features Features
	// settled is false if the slices must be built again soon.
	settled bool
}

// build returns the slices of the snapshot s for a cluster with the features f, without taints. It
// may wait for a GPU's lock and for the API server's claims and slices. If some GPUs are not
// offered as their policies ask, it writes an Event with the reasons. The result is not settled
// while claims delay a change. After an error it is unknown which devices are allocated. Only one
// call may run at a time.
func (p *Publisher) build(ctx context.Context, s inventory.Snapshot, f Features) (offer, error) {
	preview := func(o []device.Offering) []resourceslice.Slice {
		return device.Slices(device.Offer(p.withShares(o, s.Node.Driver, f)), s.Node.Driver, f.PartitionTypes)
	}
	offerings, settled, err := p.layouts.Decide(ctx, s, f.PartitionedDevices, preview)
	if err != nil {
		return offer{}, err
	}
	offerings = p.withShares(offerings, s.Node.Driver, f)
	shapes := device.Offer(offerings)
	settled = p.reportShares(offerings, shapes, f) && settled
	p.delayed.Store(!settled)
	slices := device.Slices(shapes, s.Node.Driver, f.PartitionTypes)
	p.reportSlowScheduler(slices)
	p.opts.Metrics.MIG(p.countMIG(shapes))
	limits := describeLimits(p.layouts.Limited())
	p.opts.Events.EventOnChange(events.GPUsLimited, limits, "GPUs are not offered as their policies ask: "+limits)
	return offer{slices: slices, snapshot: s, features: f, settled: settled}, nil
}

// countMIG returns the numbers for the MIG metrics: the offered MIG devices by profile, the
// existing MIG devices, and the MIG-capable GPUs. Other metrics count shared devices.
func (p *Publisher) countMIG(shapes []device.Shape) metrics.MIGState {
	now := metrics.MIGState{Offered: map[string]int{}}
	for _, s := range shapes {
		if partition, is := s.(device.Partition); is {
			now.Offered[partition.Profile()]++
		}
	}
	now.Ours, now.Foreign, now.GPUs = p.layouts.Count()
	return now
}

// describeLimits returns one line for an Event: the reasons why GPUs are not offered as configured,
// each after the names of its GPUs. limited has the reason by GPU.
func describeLimits(limited map[string]string) string {
	byReason := map[string][]string{}
	for gpu, reason := range limited {
		byReason[reason] = append(byReason[reason], gpu)
	}
	lines := make([]string, 0, len(byReason))
	for reason, gpus := range byReason {
		slices.Sort(gpus)
		lines = append(lines, fmt.Sprintf("%s: %s", strings.Join(gpus, ", "), reason))
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}
