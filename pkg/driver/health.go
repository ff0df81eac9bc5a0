package driver

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// healthInterval keeps the kubelet's view fresh: it takes a device as unknown after 30 s of silence.
const healthInterval = 10 * time.Second

// WatchHealthStatus reports every offered device, at once and then regularly, until the kubelet goes away.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- healthReport(d.cfg.NodeName, d.inv.Snapshot(), d.unhealthy.Load(), time.Now()):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// healthReport says of each device what the inventory knows: healthy while the driver answers for its GPU, unknown while the inventory is not ready.
// Every partition is in it that the GPU can have or has, whether it is cut now or not: the kubelet looks up those that its Pods hold.
// lost, if not nil, says of devices that are gone for the claims that hold them what became of them.
func healthReport(pool string, s inventory.Snapshot, lost *map[string]string, now time.Time) kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	gone := ptr.Deref(lost, nil)
	for _, g := range s.Node.GPUs {
		for _, name := range g.DeviceNames() {
			h := kubeletplugin.DeviceHealth{PoolName: pool, DeviceName: name, Health: kubeletplugin.HealthStatusHealthy, LastUpdated: now}
			if message, is := gone[name]; is {
				h.Health, h.Message = kubeletplugin.HealthStatusUnhealthy, message
			} else if !s.Ready {
				h.Health, h.Message = kubeletplugin.HealthStatusUnknown, s.Reason
			}
			report.Devices = append(report.Devices, h)
		}
	}
	return report
}
