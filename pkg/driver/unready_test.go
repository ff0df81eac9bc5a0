package driver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

func TestHealthTaintsChangeOnUnreadyNode(t *testing.T) {
	t.Parallel()
	away := func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver"} }
	for name, shut := range map[string]func(n *healthNode){
		"no hook": func(n *healthNode) {
			n.driver.node.Report(nodeview.Condition{Source: "test", Code: "hook-missing", Message: "no hook"})
		},
		"no driver":     func(n *healthNode) { n.setHardware("none", away) },
		"GPUs released": func(n *healthNode) { n.editNode(t, nil, map[string]string{quiesce.Annotation: "true"}) },
		"gone meanwhile": func(n *healthNode) {
			n.driver.node.Report(nodeview.Condition{Source: "test", Code: "hook-missing", Message: "no hook"})
			n.setHardware("one", justOneGPU)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			n.run(t)
			eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
			generation := mustList(t, n.client)[0].Spec.Pool.Generation
			tell := n.emit
			shut(n)
			eventually(t, "it is not ready", func() bool { return !n.driver.node.View().Preparable.Ready })
			if name == "gone meanwhile" {
				eventually(t, "a GPU is gone", func() bool { return len(n.driver.inv.Snapshot().Node.GPUs) == 1 })
			}

			tell(device.Signal{Event: &device.HealthEvent{Card: n.card("0000:1b:00.0"), Kind: device.EventXID, XID: 79, At: time.Now()}})
			eventually(t, "it has its taint", func() bool { return strings.Contains(n.taints(t)[firstGPU], "xid=79:NoSchedule") })
			if s := mustList(t, n.client)[0]; len(s.Spec.Devices) != 2 || s.Spec.Pool.Generation != generation {
				t.Errorf("the slice changed: %+v", s.Spec)
			}
			for _, a := range []device.RecoveryAction{device.RecoveryReset, device.RecoveryNone} {
				tell(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachOK, Recovery: a, At: time.Now()}})
			}
			eventually(t, "the taint is removed", func() bool { return !strings.Contains(n.taints(t)[firstGPU], "xid=") })
			if len(published(t, n.client)) != 2 {
				t.Error("devices are withdrawn")
			}
		})
	}
}

// A missing file of the driver costs containers that file, and neither a GPU nor the node.
func TestMissingFileKeepsGPUsOffered(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
	n.setHardware("incomplete", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		all.Omissions = []nvidia.Omission{{Kind: nvidia.MissingFile, Name: "nvidia-smi", Message: "it was not found"}}
		return all, err
	})
	eventually(t, "the problem is counted", func() bool { return n.metric(t, "gpu_dra_inventory_problems kind=missing-file") })
	if n.metric(t, "gpu_dra_inventory_problems kind=gpu") || !n.driver.node.View().Preparable.Ready || len(published(t, n.client)) != 2 {
		t.Error("the missing file costs more than itself")
	}
}

// The fingerprint does not cover every file that containers get, such as an ICD file. One that an
// admin removed costs containers that file, and no claim.
func TestRemovedFileCostsOnlyItself(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	file := filepath.Join(t.TempDir(), "nvidia_icd.json")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.setHardware("one driver", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		if _, statErr := os.Stat(file); statErr == nil {
			all.Common.Mounts = []*specs.Mount{{HostPath: file, ContainerPath: "/etc/vulkan/icd.d/nvidia_icd.json"}}
		}
		return all, err
	})
	n.run(t)
	n.register(t)
	eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
	eventually(t, "containers get the file", func() bool { return len(n.driver.inv.Snapshot().Node.Common.Mounts) == 1 })
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	claim := n.claim(t, "late", firstGPU)
	eventually(t, "the kubelet's next call prepares it", func() bool { return n.prepare(t, claim).GetError() == "" })
}

func justOneGPU() (nvidia.Node, error) {
	all, err := twoGPUs()
	all.GPUs = all.GPUs[:1]
	return all, err
}

// noGPU returns a scan result with a GPU driver but without GPUs.
func noGPU() (nvidia.Node, error) {
	all, err := twoGPUs()
	all.GPUs = nil
	return all, err
}

func TestRemovedLastGPUIsWithdrawn(t *testing.T) {
	t.Parallel()
	lost := func(n *healthNode) {
		n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachLost, At: time.Now()}})
	}
	// waitUntilApplied waits until the health loop has applied all earlier signals. For that it sends
	// an XID of another GPU, and waits until the health view contains that XID.
	waitUntilApplied := func(n *healthNode, xid uint64) {
		n.xid("0000:43:00.0", xid)
		eventually(t, "the signals are applied", func() bool {
			return slices.ContainsFunc(n.driver.health.View().Findings("0000:43:00.0"), func(f *health.Finding) bool { return f.XID == xid })
		})
	}
	for name, seenLost := range map[string]bool{"lost": true, "not asked": false} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			n.setHardware("one", justOneGPU)
			n.run(t)
			n.register(t)
			claim := n.claim(t, "held", firstGPU)
			if msg := n.prepare(t, claim).GetError(); msg != "" {
				t.Fatal(msg)
			}
			if seenLost {
				lost(n)
				eventually(t, "it has a taint", func() bool { return strings.Contains(n.taints(t)[firstGPU], "gpu-lost=:NoSchedule") })
				n.setHardware("none", noGPU)
				eventually(t, "the inventory has noticed", func() bool { return len(n.driver.inv.Snapshot().Node.GPUs) == 0 })
				lost(n)
				waitUntilApplied(n, 13)
				if got := published(t, n.client); len(got) != 1 || len(n.taints(t)) != 1 {
					t.Errorf("a removed GPU of a claim must stay published: %v", got)
				}
			}
			if msg := n.unprepare(t, claim); msg != "" {
				t.Fatal(msg)
			}
			n.setHardware("none", noGPU)
			eventually(t, "it is withdrawn", func() bool { return len(mustList(t, n.client)) == 0 })

			eventually(t, "its findings are forgotten", func() bool { return len(n.driver.health.View().Findings("0000:1b:00.0")) == 0 })
			lost(n)
			waitUntilApplied(n, 31)
			if got := published(t, n.client); len(got) != 0 {
				t.Errorf("the removed GPU is published again: %v", got)
			}

			n.setHardware("one again", justOneGPU)
			n.recovery("0000:1b:00.0", device.RecoveryNone)
			eventually(t, "another one is published", func() bool { return len(published(t, n.client)) == 1 && len(n.taints(t)) == 0 })
		})
	}
}
