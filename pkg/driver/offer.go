package driver

import (
	"context"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// offer returns the ResourceSlices for the snapshot s of the node's devices. If some GPUs are not
// offered as their MIG policy asks, it writes an Event with the reasons. settled is false if the
// publisher must call offer again soon, because claims delay a change.
func (d *Driver) offer(ctx context.Context, s inventory.Snapshot, f Features) (_ []resourceslice.Slice, settled bool, _ error) {
	var options []device.SliceOption
	if f.PartitionTypes {
		options = append(options, device.PartitionTypes(DriverName))
	}
	build := func(shapes []device.Shape) []resourceslice.Slice {
		return device.Slices(shapes, s.Node.Driver, options...)
	}
	preview := func(o []device.Offering) []resourceslice.Slice {
		return build(device.Offer(d.withShares(o, s.Node.Driver, f)))
	}
	offerings, settled, err := d.layouts.Decide(ctx, s, f.PartitionedDevices, preview)
	if err != nil {
		return nil, false, err
	}
	offerings = d.withShares(offerings, s.Node.Driver, f)
	shapes := device.Offer(offerings)
	settled = d.reportShares(offerings, shapes, f) && settled
	d.layoutsDelayed.Store(!settled)
	slices := build(shapes)
	d.slow.SetSlices(slices)
	d.metrics.MIG(d.countMIG(slices))
	limits := describeLimits(d.layouts.Limited())
	d.events.NormalOnChange("GPUsLimited", limits, "GPUs are not offered as their MIG policy asks: "+limits)
	return slices, settled, nil
}

// countMIG returns the numbers for the MIG metrics: the offered MIG devices by profile, the
// existing MIG devices, and the MIG-capable GPUs.
func (d *Driver) countMIG(slices []resourceslice.Slice) metrics.MIGState {
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

// profileOf returns the MIG profile of a MIG device in a slice. It returns "" for a whole GPU and
// for a device that several claims can share, because other metrics count shared devices.
func profileOf(d *resourceapi.Device) string {
	if ptr.Deref(d.AllowMultipleAllocations, false) {
		return ""
	}
	if a, ok := d.Attributes["profile"]; ok && a.StringValue != nil {
		return *a.StringValue
	}
	return ""
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
