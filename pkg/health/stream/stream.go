// Package stream sends the health of the node's devices to the kubelet.
//
// The kubelet gets a report of every device that the node may offer: at the start, after each
// change, and before it would count a silent device as Unknown. It picks the devices of its Pods
// and shows their health in the Pods' statuses.
//
// The package judges nothing. It combines the verdicts of package health with the devices that
// claims have lost, and with the reason why the node is not ready.
package stream

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
)

// interval is the time between two reports without a change. It is shorter than the 30 s after
// which the kubelet reports a silent device as Unknown.
const interval = 10 * time.Second

// Sources are what a report is made of.
type Sources struct {
	// Pool is the name of the node's resource pool.
	Pool string
	// Node knows the node's GPUs and whether it is ready.
	Node     func() *nodeview.View
	Verdicts Verdicts
	// LostDevices returns a message for each device that a prepared claim has lost, by the device's
	// name, and a channel that is closed at the next change.
	LostDevices func() (messages map[string]string, changed <-chan struct{})
}

// Verdicts has the health of the devices.
type Verdicts interface {
	View() *health.View
	// Changed returns a channel that is closed when there is a newer View.
	Changed() <-chan struct{}
	// Stale reports whether the View is too old to count.
	Stale(now time.Time) bool
}

// Send sends reports to the channel until the kubelet disconnects, which ends the context.
func Send(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport, from Sources) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		changed := from.Verdicts.Changed() // before View is read, so that no later change is missed
		node, now := from.Node(), time.Now()
		lost, lostChanged := from.LostDevices()
		r := reporter{pool: from.Pool, view: from.Verdicts.View(), stale: from.Verdicts.Stale(now), lost: lost}
		select {
		case <-ctx.Done():
			return
		case reports <- r.report(node, now):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-node.Changed():
		case <-lostChanged:
		case <-tick.C:
		}
	}
}

// reporter builds one report.
type reporter struct {
	pool string
	view *health.View
	// stale is true if the health verdicts have not been updated for too long.
	stale bool
	// lost has a message for each device that a prepared claim should have but that is gone from the
	// hardware, by the device's name.
	lost map[string]string
}

// report returns the health of every GPU of the node and of all its partitions, also of those that
// do not exist now.
func (r reporter) report(node *nodeview.View, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	for _, g := range node.GPUs {
		for _, name := range g.DeviceNames() {
			h := kubeletplugin.DeviceHealth{PoolName: r.pool, DeviceName: name, LastUpdated: now}
			h.Health, h.Message = r.status(node, g.GPU, name)
			report.Devices = append(report.Devices, h)
		}
	}
	return report
}

// status returns the health status of the device called name, which is the GPU g or a part of it,
// and a message for users.
func (r reporter) status(node *nodeview.View, g device.GPU, name string) (kubeletplugin.HealthStatus, string) {
	if message, is := r.lost[name]; is {
		return kubeletplugin.HealthStatusUnhealthy, message
	}
	n, _ := device.ParseName(name)
	v := r.view.Of(g, n)
	switch {
	case v.State >= health.Unhealthy:
		return kubeletplugin.HealthStatusUnhealthy, v.Message()
	case r.stale:
		return kubeletplugin.HealthStatusUnknown, "the plugin has stopped judging the GPU's health"
	case !node.Offered.Ready:
		return kubeletplugin.HealthStatusUnknown, node.Offered.Reason
	case v.State == health.Unknown:
		return kubeletplugin.HealthStatusUnknown, v.Message()
	default:
		return kubeletplugin.HealthStatusHealthy, v.Message() // a degraded device has a message
	}
}
