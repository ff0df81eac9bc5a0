package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// lostDeviceNode is a simulated node whose driver does not reconcile by itself. The test supplies
// the result of each comparison of checkpoint records with the hardware.
type lostDeviceNode struct {
	*testing.T
	*node
	d *Driver

	mu     sync.Mutex
	health map[string]kubeletplugin.DeviceHealth // the last report to the kubelet, by device
}

func newLostDeviceNode(t *testing.T) *lostDeviceNode {
	t.Helper()
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(),
		Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
	})
	if err != nil {
		t.Fatal(err)
	}
	l := &lostDeviceNode{T: t, node: n, d: d}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	reports := make(chan kubeletplugin.DeviceHealthReport)
	wg.Go(func() { d.inv.Run(ctx, d.node.Update) })
	wg.Go(func() { d.status.Run(ctx, d.preparer) })
	eventually(t, "the GPUs are known", func() bool { return d.node.View().Preparable.Ready })
	wg.Go(func() { _ = d.WatchHealthStatus(ctx, reports) })
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case r := <-reports:
				l.mu.Lock()
				l.health = map[string]kubeletplugin.DeviceHealth{}
				for _, h := range r.Devices {
					l.health[h.DeviceName] = h
				}
				l.mu.Unlock()
			}
		}
	})
	return l
}

// createPrepared creates a claim with the device as its allocation result, and prepares it.
func (l *lostDeviceNode) createPrepared(name, device string) *resourceapi.ResourceClaim {
	l.Helper()
	l.claim(l.T, name, device)
	c := l.getClaim(l.T, name)
	l.prepareClaim(c)
	return c
}

func (l *lostDeviceNode) prepareClaim(c *resourceapi.ResourceClaim) {
	l.Helper()
	if r := l.d.prepare(l.Context(), c); r.Err != nil {
		l.Fatal(r.Err)
	}
}

func (l *lostDeviceNode) unprepareClaim(c *resourceapi.ResourceClaim) {
	l.Helper()
	name := types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	if err := l.d.unprepare(l.Context(), kubeletplugin.NamespacedObject{NamespacedName: name, UID: c.UID}); err != nil {
		l.Fatal(err)
	}
}

// reportLost ends a comparison which found that only these claims have lost their device.
func (l *lostDeviceNode) reportLost(claims ...*resourceapi.ResourceClaim) {
	var lost []*prepare.LostError
	unclear := map[types.UID]bool{}
	for _, c := range claims {
		device := c.Status.Allocation.Devices.Results[0].Device
		lost = append(lost, &prepare.LostError{
			Claim: c.Namespace + "/" + c.Name, UID: c.UID, Device: device, Reason: errors.New("the device is gone"),
		})
		unclear[c.UID] = true
	}
	l.d.status.Compared(lost, unclear)
}

// expectHealth waits until the kubelet gets a report that the device is unhealthy because the claim
// to has lost it. If to is nil, it waits for a report that the device is healthy.
func (l *lostDeviceNode) expectHealth(device string, to *resourceapi.ResourceClaim) {
	l.Helper()
	deadline := time.Now().Add(5 * time.Second / 2) // a change must be reported before the next regular report
	for {
		l.mu.Lock()
		h := l.health[device]
		l.mu.Unlock()
		switch {
		case to == nil && h.Health == kubeletplugin.HealthStatusHealthy,
			to != nil && h.Health == kubeletplugin.HealthStatusUnhealthy && strings.Contains(h.Message, "claim team/"+to.Name+":"):
			return
		case time.Now().After(deadline):
			l.Fatalf("%s is reported as %s (%s)", device, h.Health, h.Message)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// expectReady waits until the claim's status says that the claim's device is ready.
func (l *lostDeviceNode) expectReady(c *resourceapi.ResourceClaim) {
	l.Helper()
	eventually(l.T, "the claim's status says that its device is ready", func() bool {
		devices := l.getClaim(l.T, c.Name).Status.Devices
		return len(devices) == 1 && devices[0].Conditions[0].Status == metav1.ConditionTrue
	})
}

// When a claim that has lost its device ends, the device must be reported as healthy. Another
// claim's device stays lost all the time, so each comparison returns an error.
func TestLostDeviceReportEndsWithItsClaim(t *testing.T) {
	for name, test := range map[string]func(l *lostDeviceNode, other, old *resourceapi.ResourceClaim){
		"it is unprepared": func(l *lostDeviceNode, other, old *resourceapi.ResourceClaim) {
			l.unprepareClaim(old)
			l.expectHealth(firstGPU, nil)
			next := l.createPrepared("next", firstGPU)
			l.reportLost(other)
			l.expectHealth(firstGPU, nil)
			l.expectReady(next)
		},
		"it is unprepared during a comparison": func(l *lostDeviceNode, other, old *resourceapi.ResourceClaim) {
			l.d.status.Comparing()
			l.unprepareClaim(old)
			next := l.createPrepared("next", firstGPU)
			l.reportLost(other, old)
			l.expectHealth(firstGPU, nil)
			l.expectReady(next)
		},
		"it is prepared again": func(l *lostDeviceNode, other, old *resourceapi.ResourceClaim) {
			l.prepareClaim(l.getClaim(l.T, "old"))
			l.expectHealth(firstGPU, nil)
			l.reportLost(other)
			l.expectHealth(firstGPU, nil)
			l.expectReady(old)
		},
		"its new allocation cannot be prepared yet": func(l *lostDeviceNode, other, _ *resourceapi.ResourceClaim) {
			again := l.getClaim(l.T, "old")
			again.Status.Allocation.Devices.Results[0].Device = secondGPU
			if r := l.d.prepare(l.Context(), again); r.Err == nil {
				l.Fatal("the claim got another claim's device")
			}
			l.expectHealth(firstGPU, nil)
		},
		"it has the device again": func(l *lostDeviceNode, other, old *resourceapi.ResourceClaim) {
			l.reportLost(other)
			l.expectHealth(firstGPU, nil)
			l.expectReady(old)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLostDeviceNode(t)
			old, other := l.createPrepared("old", firstGPU), l.createPrepared("other", secondGPU)
			l.reportLost(other, old)
			l.expectHealth(firstGPU, old)
			test(l, other, old)
			l.expectHealth(secondGPU, other)
		})
	}
}

// compare compares the checkpoint records with the hardware, as reconciliation does.
func (l *lostDeviceNode) compare() {
	l.Helper()
	if err := l.d.preparer.Reconcile(l.Context()); err != nil {
		l.Error(err)
	}
}

// If a comparison fails before it finds anything out about the claim, the claim's device must stay
// lost.
func TestLostDeviceStaysLostAfterUnrelatedError(t *testing.T) {
	l := newLostDeviceNode(t)
	old := l.createPrepared("old", firstGPU)
	l.reportLost(old)
	l.expectHealth(firstGPU, old)
	l.d.status.Compared(nil, map[types.UID]bool{old.UID: true})
	records := filepath.Join(l.cfg.StateDir(), "claims")
	if err := os.Rename(records, records+".away"); err != nil {
		t.Fatal(err)
	}
	if err := l.d.preparer.Reconcile(t.Context()); err == nil {
		t.Error("the records were compared")
	}
	if err := os.Rename(records+".away", records); err != nil {
		t.Fatal(err)
	}
	if got, _ := l.d.status.LostDevices(); len(got) != 1 {
		t.Errorf("the device is no longer lost: %v", got)
	}
	l.expectHealth(firstGPU, old)
	l.reportLost()
	l.expectHealth(firstGPU, nil)
}

// While no GPU driver is loaded, the comparison with the hardware cannot find the claim's device. A
// device that was lost before must stay lost until a comparison has found it.
func TestLostDeviceStaysLostWhileUnchecked(t *testing.T) {
	l := newLostDeviceNode(t)
	old := l.createPrepared("old", firstGPU)
	l.reportLost(old)
	l.expectHealth(firstGPU, old)

	l.setHardware("none", func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver"} })
	l.d.inv.RequestScan()
	eventually(t, "the node is not ready", func() bool { return !l.d.node.View().Preparable.Ready })
	l.compare()
	if got, _ := l.d.status.LostDevices(); len(got) != 1 {
		t.Errorf("the device is no longer lost: %v", got)
	}

	l.setHardware("driver", twoGPUs)
	l.d.inv.RequestScan()
	eventually(t, "the node is ready", func() bool { return l.d.node.View().Preparable.Ready })
	l.compare()
	l.expectHealth(firstGPU, nil)
	l.expectReady(old)
}
