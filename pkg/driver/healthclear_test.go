package driver

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestAdminClearsGPU(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.xid("0000:1b:00.0", 79)
	n.xid("0000:43:00.0", 95)
	eventually(t, "both GPUs are tainted", func() bool { return len(n.taints(t)) == 2 })
	cleared := map[string]string{DriverName + "/clear-health": firstGPU + ",gpu-0000-99-00-0"}
	n.editNode(t, nil, cleared)
	eventually(t, "the named GPU is untainted", func() bool { all := n.taints(t); return len(all) == 1 && all[secondGPU] != "" })
	eventually(t, "an Event reports it", func() bool { return n.hasEvent(t, "Node", "node", "GPURecovered", "an admin cleared it") })
	eventually(t, "an Event names the unknown GPU", func() bool {
		return n.hasEvent(t, "Node", "node", "HealthNotCleared", "gpu-0000-99-00-0")
	})

	n.send(device.Signal{Event: &device.HealthEvent{Card: n.card("0000:1b:00.0"), Kind: device.EventXID, XID: 95, At: time.Now()}})
	eventually(t, "a later event counts", func() bool { return strings.Contains(n.taints(t)[firstGPU], "xid=95:") })
	before := n.taints(t)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.emit = nil
	n.run(t)
	n.xid("0000:43:00.0", 31)
	eventually(t, "the restarted plugin watches health", func() bool { return len(n.driver.health.View().Findings("0000:43:00.0")) == 2 })
	if after := n.taints(t); len(after) != 2 || after[firstGPU] != before[firstGPU] {
		t.Errorf("the restart cleared the GPU again: %v, before %v", after, before)
	}
}
