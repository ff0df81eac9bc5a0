package driver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// editNode replaces the Node's labels and annotations.
func (n *healthNode) editNode(t *testing.T, labels, annotations map[string]string) {
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

func (n *healthNode) watching() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.emit != nil
}

func TestGPUsAreReleasedOnRequest(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string][2]map[string]string{
		"by annotation": {nil, {"gpu.nvidia.com/release-driver": "true"}},
		"by label":      {{"nvidia.com/gpu.deploy.dra-driver": "paused-for-driver-upgrade"}, nil},
		"as a client":   {{"nvidia.com/gpu.deploy.client": "custom_paused-for-driver-upgrade"}, nil},
		"for MIG":       {{"nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			var scans atomic.Int64
			scan := func() (nvidia.Node, error) { scans.Add(1); return twoGPUs() }
			n.setHardware("driver", scan)
			n.run(t)
			n.register(t)
			held, late := n.claim(t, "held", firstGPU), n.claim(t, "late", secondGPU)
			eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })

			n.editNode(t, ask[0], ask[1])
			eventually(t, "the watcher stopped", func() bool { return !n.watching() })
			eventually(t, "Prepare is refused with the reason", func() bool {
				return strings.Contains(n.prepare(t, late).GetError(), "released for a driver upgrade")
			})
			before := scans.Load()
			n.setHardware("another driver", scan)
			if msg := n.unprepare(t, held); msg != "" {
				t.Errorf("a claim cannot be unprepared: %s", msg)
			}
			eventually(t, "the Node has an Event", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asks for it") || n.hasEvent(t, "Node", "node", "DriverReleased", "paused")
			})
			eventually(t, "the inventory is not ready", func() bool {
				return strings.Contains(n.driver.inv.Snapshot().Reason, "released for a driver upgrade")
			})
			if now := scans.Load(); now != before {
				t.Errorf("the hardware was scanned %d times", now-before)
			}
			if len(published(t, n.client)) != 2 {
				t.Error("the devices were withdrawn")
			}

			n.editNode(t, nil, nil)
			eventually(t, "the watcher runs", n.watching)
			eventually(t, "claims are prepared", func() bool { return n.prepare(t, late).GetError() == "" })
			if scans.Load() == before {
				t.Error("the hardware was not scanned")
			}
			n.recovery("0000:1b:00.0", device.RecoveryNone)
			if msg := n.unprepare(t, late); msg != "" {
				t.Error(msg)
			}
		})
	}
}

func TestReleasedGPUsAreNotBoundForVirtualMachines(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.setHardware("driver", func() (nvidia.Node, error) {
		node, err := twoGPUs()
		for i := range node.GPUs {
			node.GPUs[i].Passthrough = &device.Passthrough{HasDriver: true}
		}
		return node, err
	})
	n.run(t)
	n.register(t)
	n.editNode(t, nil, map[string]string{passthroughAnnotation: "true"})
	name := device.Name{GPU: secondGPU, Passthrough: true}.String()
	eventually(t, "the node has the device", func() bool {
		return slices.Contains(published(t, n.client), name)
	})
	machine := n.claim(t, "machine", name)
	n.editNode(t, nil, map[string]string{passthroughAnnotation: "true", quiesce.Annotation: "true"})
	eventually(t, "the GPUs are released", func() bool {
		done, ok := n.driver.hardware.Use()
		done()
		return !ok
	})
	if msg := n.prepare(t, machine).GetError(); !strings.Contains(msg, "released for a driver upgrade") {
		t.Errorf("Prepare says %q", msg)
	}
}

// noReadiness drops all conditions.
type noReadiness struct{}

func (noReadiness) Report(nodeview.Condition) {}
func (noReadiness) Clear(string)              {}

// storeReleaseRequest stores the request to release the GPUs, as an earlier plugin process did.
func (n *node) storeReleaseRequest(t *testing.T) {
	t.Helper()
	quiesce.New(t.Context(), quiesce.Options{
		Access: quiesce.NewAccess(), StateDir: n.cfg.StateDir(),
		Readiness: noReadiness{},
	}).Observe(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"gpu.nvidia.com/release-driver": "true"}}})
}

func TestStartDuringReleaseDoesNotOpenGPUs(t *testing.T) {
	for name, ask := range map[string]func(*healthNode){
		"asked": func(n *healthNode) { n.editNode(t, nil, map[string]string{"gpu.nvidia.com/release-driver": "true"}) },
		"remembered": func(n *healthNode) {
			n.storeReleaseRequest(t)
			prependReactor(n.client, "*", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewServiceUnavailable("away")
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			ask(n)
			var taken atomic.Int64
			n.setHardware("driver", func() (nvidia.Node, error) { taken.Add(1); return twoGPUs() })
			n.startPlugin(t)
			eventually(t, "an Event reports the release", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asked for") || n.hasEvent(t, "Node", "node", "DriverReleased", "asks for")
			})
			eventually(t, "the inventory is not ready", func() bool {
				return strings.Contains(n.driver.inv.Snapshot().Reason, "released for a driver upgrade")
			})
			eventually(t, "it serves the kubelet", func() bool { return n.driver.helper.Load() != nil })
			n.register(t)
			if msg := n.prepare(t, n.claim(t, "early", firstGPU)).GetError(); !strings.Contains(msg, "released for a driver upgrade") {
				t.Errorf("a claim was prepared: %q", msg)
			}
			if taken.Load() != 0 || n.watching() {
				t.Errorf("the hardware was scanned %d times; watching: %v", taken.Load(), n.watching())
			}
			if name != "asked" {
				return
			}
			n.editNode(t, nil, nil)
			eventually(t, "the watcher runs", n.watching)
			if _, err := os.Stat(filepath.Join(n.cfg.StateDir(), "release")); !os.IsNotExist(err) {
				t.Errorf("the request is still stored: %v", err)
			}
		})
	}
}
