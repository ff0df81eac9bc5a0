package driver

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestAnAdminClearsAGPU(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.xid("0000:1b:00.0", 79)
	n.xid("0000:43:00.0", 95)
	eventually(t, "both have taints", func() bool { return len(n.taints(t)) == 2 })
	cleared := map[string]string{clearAnnotation: firstGPU + ",gpu-0000-99-00-0"}
	n.change(t, nil, cleared)
	eventually(t, "the one that the admin names is well", func() bool { all := n.taints(t); return len(all) == 1 && all[secondGPU] != "" })
	eventually(t, "it is told", func() bool { return n.hasEvent(t, "Node", "node", "GPURecovered", "an admin says so") })
	eventually(t, "a wrong name is told", func() bool { return n.hasEvent(t, "Node", "node", "HealthNotCleared", "gpu-0000-99-00-0") })

	n.says(device.Signal{Event: &device.HealthEvent{Card: n.card("0000:1b:00.0"), Kind: device.EventXID, XID: 95, At: time.Now()}})
	eventually(t, "what comes after it counts", func() bool { return strings.Contains(n.taints(t)[firstGPU], "xid=95:") })
	before := n.taints(t)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.tell = nil
	n.run(t)
	n.xid("0000:43:00.0", 31)
	eventually(t, "the restarted plugin judges", func() bool { return len(n.driver.health.View().Findings("0000:43:00.0")) == 2 })
	if after := n.taints(t); len(after) != 2 || after[firstGPU] != before[firstGPU] {
		t.Errorf("a restart clears again: %v, before %v", after, before)
	}
}
