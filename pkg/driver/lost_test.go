package driver

import (
	"context"
	"errors"
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
)

// losing is a plugin that compares nothing by itself. A test says what a comparison has found.
type losing struct {
	*testing.T
	*node
	d *Driver

	mu     sync.Mutex
	health map[string]kubeletplugin.DeviceHealth // as the kubelet heard it last, by device
}

func newLosing(t *testing.T) *losing {
	t.Helper()
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Metrics: metrics.New("test")})
	if err != nil {
		t.Fatal(err)
	}
	l := &losing{T: t, node: n, d: d}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	reports := make(chan kubeletplugin.DeviceHealthReport)
	wg.Go(func() { d.inv.Run(ctx) })
	wg.Go(func() { d.status.Run(ctx) })
	eventually(t, "the GPUs are known", func() bool { return d.readiness.Snapshot().Ready })
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

// prepared is a claim that has the device.
func (l *losing) prepared(name, device string) *resourceapi.ResourceClaim {
	l.Helper()
	l.claim(l.T, name, device)
	c := l.stored(name)
	l.prepares(c)
	return c
}

func (l *losing) prepares(c *resourceapi.ResourceClaim) {
	l.Helper()
	if r := l.d.prepare(l.Context(), c); r.Err != nil {
		l.Fatal(r.Err)
	}
}

func (l *losing) unprepares(c *resourceapi.ResourceClaim) {
	l.Helper()
	if err := l.d.unprepare(l.Context(), kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID}); err != nil {
		l.Fatal(err)
	}
}

func (l *losing) stored(name string) *resourceapi.ResourceClaim {
	l.Helper()
	c, err := l.client.ResourceV1().ResourceClaims("team").Get(l.Context(), name, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	return c
}

// lost is what a comparison says of a claim's device.
func lost(c *resourceapi.ResourceClaim) *prepare.LostError {
	device := c.Status.Allocation.Devices.Results[0].Device
	return &prepare.LostError{Claim: c.Namespace + "/" + c.Name, UID: c.UID, Device: device, GPU: device, Reason: errors.New("it is gone")}
}

// is waits until the kubelet hears of a device that it is lost to this claim, or well.
func (l *losing) is(device string, to *resourceapi.ResourceClaim) {
	l.Helper()
	deadline := time.Now().Add(healthInterval / 4) // nobody waits for the next regular report
	for {
		l.mu.Lock()
		h := l.health[device]
		l.mu.Unlock()
		switch {
		case to == nil && h.Health == kubeletplugin.HealthStatusHealthy,
			to != nil && h.Health == kubeletplugin.HealthStatusUnhealthy && strings.Contains(h.Message, "claim team/"+to.Name+":"):
			return
		case time.Now().After(deadline):
			l.Fatalf("%s is said to be %s (%s)", device, h.Health, h.Message)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// isReady waits until the claim's status says that its device is ready.
func (l *losing) isReady(c *resourceapi.ResourceClaim) {
	l.Helper()
	eventually(l.T, "the claim's status says that its device is ready", func() bool {
		devices := l.stored(c.Name).Status.Devices
		return len(devices) == 1 && devices[0].Conditions[0].Status == metav1.ConditionTrue
	})
}

// One device is lost for good in all of this, so that no comparison ends without an error.
func TestWhatIsSaidOfALostDeviceEndsWithItsClaim(t *testing.T) {
	for name, test := range map[string]func(l *losing, other, old *resourceapi.ResourceClaim){
		"it is given back": func(l *losing, other, old *resourceapi.ResourceClaim) {
			l.unprepares(old)
			l.is(firstGPU, nil)
			next := l.prepared("next", firstGPU)
			l.d.reportLost(l.Context(), lost(other))
			l.is(firstGPU, nil)
			l.isReady(next)
		},
		"it is given back while a comparison runs": func(l *losing, other, old *resourceapi.ResourceClaim) {
			l.d.lost.Begin()
			l.unprepares(old)
			next := l.prepared("next", firstGPU)
			l.d.reportLost(l.Context(), errors.Join(lost(other), lost(old)))
			l.is(firstGPU, nil)
			l.isReady(next)
		},
		"it is prepared again": func(l *losing, other, old *resourceapi.ResourceClaim) {
			l.prepares(l.stored("old"))
			l.is(firstGPU, nil)
			l.d.reportLost(l.Context(), lost(other))
			l.is(firstGPU, nil)
			l.isReady(old)
		},
		"it has another allocation, and cannot have that yet": func(l *losing, other, _ *resourceapi.ResourceClaim) {
			again := l.stored("old")
			again.Status.Allocation.Devices.Results[0].Device = secondGPU
			if r := l.d.prepare(l.Context(), again); r.Err == nil {
				l.Fatal("it has what another claim holds")
			}
			l.is(firstGPU, nil)
		},
		"it has the device again": func(l *losing, other, old *resourceapi.ResourceClaim) {
			l.d.reportLost(l.Context(), lost(other))
			l.is(firstGPU, nil)
			l.isReady(old)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLosing(t)
			l.d.preparer.HeldPatience = 0
			old, other := l.prepared("old", firstGPU), l.prepared("other", secondGPU)
			l.d.reportLost(t.Context(), errors.Join(lost(other), lost(old)))
			l.is(firstGPU, old)
			test(l, other, old)
			l.is(secondGPU, other)
		})
	}
}

// An error that may stand in for that of the claim leaves open how its device is.
func TestALostDeviceStaysLostWhileNothingElseIsKnown(t *testing.T) {
	l := newLosing(t)
	old := l.prepared("old", firstGPU)
	l.d.reportLost(t.Context(), lost(old))
	l.d.reportLost(t.Context(), errors.New("list the records: input/output error"))
	l.is(firstGPU, old)
	l.d.reportLost(t.Context(), nil)
	l.is(firstGPU, nil)
}

// Nothing was seen of the device, so nothing says that the claim has it again.
func TestALostDeviceStaysLostWhileItCannotBeLookedAt(t *testing.T) {
	l := newLosing(t)
	old := l.prepared("old", firstGPU)
	l.d.reportLost(t.Context(), lost(old))
	l.is(firstGPU, old)

	l.say("none", func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver"} })
	l.d.inv.Doubt()
	eventually(t, "the node is not ready", func() bool { return !l.d.readiness.Snapshot().Ready })
	if _, err := l.d.reconcileOnce(t.Context()); err != nil {
		t.Error(err)
	}
	if got := l.d.lost.Messages(); len(got) != 1 {
		t.Errorf("it is not lost any more: %v", got)
	}

	l.say("driver", twoGPUs)
	l.d.inv.Doubt()
	eventually(t, "the node is ready", func() bool { return l.d.readiness.Snapshot().Ready })
	if _, err := l.d.reconcileOnce(t.Context()); err != nil {
		t.Error(err)
	}
	l.is(firstGPU, nil)
	l.isReady(old)
}
