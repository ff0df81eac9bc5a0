package driver

import (
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// change edits the Node.
func (n *ailing) change(t *testing.T, labels, annotations map[string]string) {
	t.Helper()
	node, err := n.client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Labels, node.Annotations = labels, annotations
	if _, err := n.client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (n *ailing) listens() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.tell != nil
}

func TestTheHardwareIsLetGoOf(t *testing.T) {
	for name, ask := range map[string][2]map[string]string{
		"by annotation": {nil, {"gpu.nvidia.com/release-driver": "true"}},
		"by label":      {{"nvidia.com/gpu.deploy.dra-driver": "true,paused-for-driver-upgrade"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newAiling(t)
			var scans atomic.Int64
			scan := func() (nvidia.Node, error) { scans.Add(1); return twoGPUs() }
			n.say("driver", scan)
			n.run(t)
			n.register(t)
			held, late := n.claim(t, "held", firstGPU), n.claim(t, "late", secondGPU)
			eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })

			n.change(t, ask[0], ask[1])
			eventually(t, "nobody listens", func() bool { return !n.listens() })
			eventually(t, "nothing is prepared, and it is said why", func() bool { return strings.Contains(n.prepare(t, late).GetError(), "let go of") })
			before := scans.Load()
			n.say("another driver", scan)
			if msg := n.unprepare(t, held); msg != "" {
				t.Errorf("a claim cannot be given back: %s", msg)
			}
			eventually(t, "the Node has an Event", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asks for it") || n.hasEvent(t, "Node", "node", "DriverReleased", "paused")
			})
			eventually(t, "the inventory has noticed", func() bool { return strings.Contains(n.driver.inv.Snapshot().Reason, "let go of") })
			if now := scans.Load(); now != before {
				t.Errorf("the hardware was looked at %d times", now-before)
			}
			if len(published(t, n.client)) != 2 {
				t.Error("the devices are withdrawn")
			}

			n.change(t, nil, nil)
			eventually(t, "somebody listens", n.listens)
			eventually(t, "claims are prepared", func() bool { return n.prepare(t, late).GetError() == "" })
			if scans.Load() == before {
				t.Error("the hardware was not looked at")
			}
			n.recovery("0000:1b:00.0", device.RecoveryNone)
			if msg := n.unprepare(t, late); msg != "" {
				t.Error(msg)
			}
		})
	}
}

func TestAPluginThatStartsDuringAnUpgradeTakesNothing(t *testing.T) {
	n := newAiling(t)
	n.change(t, nil, map[string]string{"gpu.nvidia.com/release-driver": "true"})
	r := newRelease()
	r.gate, r.told = &gate{inv: &fakeInventory{}}, func(bool, string) {}
	node, err := n.client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.See(node)
	if !r.On() || !r.gate.Closed() {
		t.Error("it takes the hardware")
	}
}
