package driver

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// healthReportInterval is shorter than the 30 s after which the kubelet reports a silent device as
// Unknown.
const healthReportInterval = 10 * time.Second

// WatchHealthStatus sends the health of every offered device to the channel reports: once at the
// start, after each change, and every healthReportInterval. It returns when the kubelet
// disconnects.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.NewTicker(healthReportInterval)
	defer tick.Stop()
	for {
		changed := d.health.Changed() // before View is read, so that no later change is missed
		now := time.Now()
		lost, lostChanged := d.status.LostDevices()
		r := healthReporter{pool: d.cfg.NodeName, view: d.health.View(), stale: d.health.Stale(now), lost: lost}
		select {
		case <-ctx.Done():
			return nil
		case reports <- r.report(d.offered().Snapshot(), now):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-lostChanged:
		case <-tick.C:
		}
	}
}

// healthReporter builds the health reports for the kubelet.
type healthReporter struct {
	pool string
	view *health.View
	// stale is true if the health verdicts have not been updated for too long.
	stale bool
	// lost has a message for each device that a prepared claim should have but that is gone from the
	// hardware, by the device's name.
	lost map[string]string
}

// report returns the health of every GPU of the snapshot and of all its partitions, also of those
// that do not exist now. The kubelet picks the devices of its Pods.
func (r healthReporter) report(s inventory.Snapshot, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	for _, g := range s.Node.GPUs {
		for _, name := range g.DeviceNames() {
			h := kubeletplugin.DeviceHealth{PoolName: r.pool, DeviceName: name, LastUpdated: now}
			h.Health, h.Message = r.status(s, g.GPU, name)
			report.Devices = append(report.Devices, h)
		}
	}
	return report
}

// status returns the health status of the device called name, which is the GPU g or a part of it,
// and a message for users.
func (r healthReporter) status(s inventory.Snapshot, g device.GPU, name string) (kubeletplugin.HealthStatus, string) {
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
	case !s.Ready:
		return kubeletplugin.HealthStatusUnknown, s.Reason
	case v.State == health.Unknown:
		return kubeletplugin.HealthStatusUnknown, v.Message()
	default:
		return kubeletplugin.HealthStatusHealthy, v.Message() // a degraded device has a message
	}
}
