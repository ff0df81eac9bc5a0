package driver

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// healthInterval keeps the kubelet's view fresh: it takes a device as unknown after 30 s of silence.
const healthInterval = 10 * time.Second

// WatchHealthStatus reports every offered device, at once, with each change and regularly, until the kubelet goes away.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		changed := d.health.Changed() // before looking: what comes after it wakes us
		now := time.Now()
		r := reporter{pool: d.cfg.NodeName, view: d.health.View(), stale: d.health.Stale(now), lost: d.lost.Messages()}
		select {
		case <-ctx.Done():
			return nil
		case reports <- r.report(d.offered().Snapshot(), now):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

// reporter says to the kubelet how devices are.
type reporter struct {
	pool string
	view *health.View
	// stale says that nobody has thought about the verdicts for long.
	stale bool
	// lost says of devices that are gone for the claims that hold them what became of them.
	lost map[string]string
}

// report has every device of the snapshot, and every partition that a GPU can have or has, whether it is cut now or not: the kubelet looks up those that its
// Pods hold.
func (r reporter) report(s inventory.Snapshot, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	for _, g := range s.Node.GPUs {
		for _, name := range g.DeviceNames() {
			h := kubeletplugin.DeviceHealth{PoolName: r.pool, DeviceName: name, LastUpdated: now}
			h.Health, h.Message = r.judge(s, g.GPU, name)
			report.Devices = append(report.Devices, h)
		}
	}
	return report
}

// judge says what is gravest of a device.
func (r reporter) judge(s inventory.Snapshot, g device.GPU, name string) (kubeletplugin.HealthStatus, string) {
	if message, is := r.lost[name]; is {
		return kubeletplugin.HealthStatusUnhealthy, message
	}
	n, _ := device.ParseName(name)
	v := r.view.Of(g, n)
	switch {
	case v.State >= health.Unhealthy:
		return kubeletplugin.HealthStatusUnhealthy, v.Message()
	case r.stale:
		return kubeletplugin.HealthStatusUnknown, "the plugin does not judge the hardware any more"
	case !s.Ready:
		return kubeletplugin.HealthStatusUnknown, s.Reason
	case v.State == health.Unknown:
		return kubeletplugin.HealthStatusUnknown, v.Message()
	default:
		return kubeletplugin.HealthStatusHealthy, v.Message() // of a degraded one
	}
}
