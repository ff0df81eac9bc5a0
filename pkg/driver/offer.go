package driver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// offer makes slices of what the node has, and says where people look in which shapes it is offered.
func (d *Driver) offer(ctx context.Context, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool, _ error) {
	var options []device.SliceOption
	if f.PartitionTypes {
		options = append(options, device.PartitionTypes(DriverName))
	}
	cut := func(shapes []device.Shape) []resourceslice.Slice {
		return device.Slices(shapes, s.Node.Driver, options...)
	}
	offerings, settled, err := d.layouts.Decide(ctx, s, f.PartitionedDevices, func(o []device.Offering) []resourceslice.Slice {
		return cut(device.Offer(d.inShares(o, s.Node.Driver, f)))
	})
	if err != nil {
		return nil, false, err
	}
	offerings = d.inShares(offerings, s.Node.Driver, f)
	shapes := device.Offer(offerings)
	settled = d.tellShares(offerings, shapes, f) && settled
	d.unsettled.Store(!settled)
	slices := cut(shapes)
	d.slow.Publishes(slices)
	d.metrics.MIG(d.count(slices))
	limited := d.layouts.Limited()
	if !maps.Equal(limited, d.limited) {
		if len(limited) > 0 {
			d.events.normal("GPUsLimited", "Not offered as the policy wants: "+describe(limited))
		}
		d.limited = limited
	}
	return slices, settled, nil
}

// count is what the metrics show of the GPUs that can be cut.
func (d *Driver) count(slices []resourceslice.Slice) metrics.MIGState {
	now := metrics.MIGState{Offered: map[string]int{}}
	for _, s := range slices {
		for i := range s.Devices {
			if profile := profileOf(&s.Devices[i]); profile != "" {
				now.Offered[profile]++
			}
		}
	}
	now.Ours, now.Foreign, now.GPUs = d.layouts.Count()
	return now
}

// profileOf is empty for a whole GPU, and for shares, which are counted apart.
func profileOf(d *resourceapi.Device) string {
	if ptr.Deref(d.AllowMultipleAllocations, false) {
		return ""
	}
	if a, ok := d.Attributes["profile"]; ok && a.StringValue != nil {
		return *a.StringValue
	}
	return ""
}

// describe is one line for an Event.
func describe(limited map[string]string) string {
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
