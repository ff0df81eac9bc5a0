package driver

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// healthNode is a simulated node with a fake hardware watcher. The test sends the watcher's
// signals.
type healthNode struct {
	*node
	driver  *Driver
	metrics *metrics.Metrics
	mu      sync.Mutex
	emit    func(device.Signal)
}

// run starts the plugin and waits until it serves the kubelet, watches the hardware and has
// published slices.
func (n *healthNode) run(t *testing.T) {
	t.Helper()
	n.startPlugin(t)
	eventually(t, "the plugin serves, watches and publishes", func() bool {
		return n.serves() && n.watching() && len(published(t, n.client)) > 0
	})
}

// startPlugin starts the plugin and does not wait until it is ready.
func (n *healthNode) startPlugin(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	n.metrics = metrics.New("test")
	n.probe = NewProbe()
	d, err := New(ctx, n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Partitions: preparetest.NoPartitions{}, Metrics: n.metrics,
		Watch: func(ctx context.Context, tell func(device.Signal)) error {
			n.mu.Lock()
			n.emit = tell
			n.mu.Unlock()
			<-ctx.Done()
			n.mu.Lock()
			n.emit = nil
			n.mu.Unlock()
			return nil
		},
		StopWorkers: noWorkers,
	})
	if err != nil {
		t.Fatal(err)
	}
	n.driver = d
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx, n.probe) }()
	n.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = n.stop() })
}

func (n *healthNode) send(s device.Signal) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.emit(s)
}

func (n *healthNode) card(address device.PCIAddress) device.Card {
	return device.Card{PCIAddress: address, UUID: "GPU-" + string(address)}
}

func (n *healthNode) xid(address device.PCIAddress, code uint64) {
	n.send(device.Signal{Event: &device.HealthEvent{Card: n.card(address), Kind: device.EventXID, XID: code, At: time.Now()}})
}

func (n *healthNode) recovery(address device.PCIAddress, a device.RecoveryAction) {
	n.send(device.Signal{Condition: &device.Condition{Card: n.card(address), Reach: device.ReachOK, Recovery: a, At: time.Now()}})
}

// taints returns the taints in the published slices, by device name, each as KEY=VALUE:EFFECT@TIME.
func (n *healthNode) taints(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, s := range mustList(t, n.client) {
		for _, d := range s.Spec.Devices {
			for _, taint := range d.Taints {
				all[d.Name] += fmt.Sprintf("%s=%s:%s@%s ", taint.Key, taint.Value, taint.Effect, taint.TimeAdded.UTC().Format(time.RFC3339))
			}
		}
	}
	return all
}

func (n *healthNode) hasEvent(t *testing.T, kind, name, reason, message string) bool {
	t.Helper()
	list, err := n.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, message) {
			return true
		}
	}
	return false
}

func (n *healthNode) metric(t *testing.T, line string) bool {
	t.Helper()
	families, err := n.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			text := f.GetName()
			for _, l := range m.GetLabel() {
				text += " " + l.GetName() + "=" + l.GetValue()
			}
			if strings.HasPrefix(text, line) && (m.GetGauge().GetValue() > 0 || m.GetCounter().GetValue() > 0) {
				return true
			}
		}
	}
	return false
}

// kubeletView has the last health report that the plugin sent to the kubelet, by device name.
type kubeletView struct {
	mu   sync.Mutex
	last map[string]kubeletplugin.DeviceHealth
}

func (n *healthNode) kubeletView(t *testing.T) *kubeletView {
	t.Helper()
	w := &kubeletView{}
	reports := make(chan kubeletplugin.DeviceHealthReport)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go func() { _ = n.driver.WatchHealthStatus(ctx, reports) }()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case r := <-reports:
				w.mu.Lock()
				w.last = map[string]kubeletplugin.DeviceHealth{}
				for _, d := range r.Devices {
					w.last[d.DeviceName] = d
				}
				w.mu.Unlock()
			}
		}
	}()
	return w
}

func (w *kubeletView) device(name string) kubeletplugin.DeviceHealth {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last[name]
}

func newHealthNode(t *testing.T) *healthNode {
	t.Helper()
	n := &healthNode{node: newNode(t)}
	named := 0
	prependReactor(n.client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		// The fake client generates no names, but the slice controller needs the names to find its
		// slices.
		s := a.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if s.Name == "" {
			named++
			s.Name = fmt.Sprintf("%s%05d", s.GenerateName, named)
		}
		return false, nil, nil
	})
	return n
}

func TestBrokenGPUIsTaintedReportedAndRecovers(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	kubelet := n.kubeletView(t)
	eventually(t, "the kubelet sees a healthy GPU", func() bool { return kubelet.device(firstGPU).Health == "Healthy" })
	claim := n.claim(t, "held", firstGPU)
	n.reserve(t, "held", "pod-1")
	if msg := n.prepare(t, claim).GetError(); msg != "" {
		t.Fatal(msg)
	}

	n.xid("0000:1b:00.0", 79)
	eventually(t, "the device is tainted", func() bool {
		return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/xid=79:NoSchedule@")
	})
	if all := n.taints(t); len(all) != 1 {
		t.Errorf("other devices are tainted too: %v", all)
	}
	eventually(t, "the kubelet sees the fault", func() bool {
		h := kubelet.device(firstGPU)
		return h.Health == "Unhealthy" && strings.Contains(h.Message, "PCIe bus") && strings.Contains(h.Message, "power")
	})
	if h := kubelet.device(secondGPU); h.Health != "Healthy" {
		t.Errorf("the other GPU: %+v", h)
	}
	eventually(t, "the Node has an Event", func() bool { return n.hasEvent(t, "Node", "node", "GPUUnhealthy", "XID 79") })
	eventually(t, "the Pod has an Event", func() bool { return n.hasEvent(t, "Pod", "pod-1", "GPUUnhealthy", firstGPU) })
	for _, line := range []string{
		"gpu_dra_gpu_health code=xid-79 device=" + firstGPU + " state=Unhealthy",
		"gpu_dra_health_events_total code=xid-79 gpu=" + firstGPU, "gpu_dra_tainted_devices effect=NoSchedule key=xid"} {
		eventually(t, "the metrics show "+line, func() bool { return n.metric(t, line) })
	}

	// A restart of the plugin must change nothing, not even the taint's time.
	before := n.taints(t)[firstGPU]
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	if got := n.taints(t)[firstGPU]; got != before {
		t.Errorf("after the stop it has %q, before %q", got, before)
	}
	n.emit = nil
	n.client.ClearActions()
	n.run(t)
	kubelet = n.kubeletView(t)
	eventually(t, "the kubelet sees the fault again", func() bool { return kubelet.device(firstGPU).Health == "Unhealthy" })
	n.recovery("0000:43:00.0", device.RecoveryNone)
	n.recovery("0000:1b:00.0", device.RecoveryNone)
	n.xid("0000:43:00.0", 31) // the loop evaluates this XID after the signals above
	eventually(t, "all signals are applied and reported", func() bool {
		return n.metric(t, "gpu_dra_health_events_total code=xid-31") && len(n.driver.health.View().Findings("0000:43:00.0")) == 1
	})
	eventually(t, "the taint is published", func() bool { return n.metric(t, "gpu_dra_tainted_devices effect=NoSchedule key=xid") })
	for _, a := range n.client.Actions() {
		if a.Matches("update", "resourceslices") || a.Matches("delete", "resourceslices") {
			t.Errorf("the restart wrote slices: %v", a)
		}
	}
	if got := n.taints(t)[firstGPU]; got != before {
		t.Errorf("after a restart it has %q, before %q", got, before)
	}

	n.recovery("0000:1b:00.0", device.RecoveryReset)
	n.recovery("0000:1b:00.0", device.RecoveryNone)
	eventually(t, "no device is tainted", func() bool { return len(n.taints(t)) == 0 })
	eventually(t, "the kubelet sees a healthy GPU", func() bool { return kubelet.device(firstGPU).Health == "Healthy" })
	eventually(t, "the Pod has an Event", func() bool { return n.hasEvent(t, "Pod", "pod-1", "GPURecovered", "XID 79") })
	eventually(t, "the metrics show a healthy GPU", func() bool {
		return n.metric(t, "gpu_dra_gpu_health code= device="+firstGPU+" state=Healthy")
	})
	if msg := n.unprepare(t, claim); msg != "" {
		t.Error(msg)
	}
}

func TestRecoveredEventNeedsAHealthyGPU(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.recovery("0000:1b:00.0", device.RecoveryReset)
	eventually(t, "it is unhealthy", func() bool { return n.hasEvent(t, "Node", "node", "GPUUnhealthy", "release-driver=true") })
	n.send(device.Signal{Condition: &device.Condition{
		Card: n.card("0000:1b:00.0"), Reach: device.ReachOK, Recovery: device.RecoveryReboot, At: time.Now()}})
	eventually(t, "the next finding is reported", func() bool { return n.hasEvent(t, "Node", "node", "GPUChanged", "it is Unhealthy") })
	if n.hasEvent(t, "Node", "node", "GPURecovered", "") {
		t.Error("GPURecovered was sent for an unhealthy GPU")
	}
	n.recovery("0000:1b:00.0", device.RecoveryNone)
	eventually(t, "it is healthy", func() bool { return n.hasEvent(t, "Node", "node", "GPURecovered", firstGPU) })
}

// reserve adds the Pod to the objects that the claim called name is reserved for.
func (n *healthNode) reserve(t *testing.T, name, pod string) {
	t.Helper()
	c, err := n.client.ResourceV1().ResourceClaims("team").Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.Status.ReservedFor = append(c.Status.ReservedFor,
		resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: "uid-of-pod"})
	if _, err := n.client.ResourceV1().ResourceClaims("team").Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestApplicationErrorsAreReportedToPods(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	claim := n.claim(t, "held", secondGPU)
	n.reserve(t, "held", "pod-2")
	if msg := n.prepare(t, claim).GetError(); msg != "" {
		t.Fatal(msg)
	}
	n.client.ClearActions()
	for range 1000 {
		n.xid("0000:43:00.0", 31)
	}
	eventually(t, "the Pod has an Event", func() bool { return n.hasEvent(t, "Pod", "pod-2", "GPUReport", "XID 31") })
	if n.hasEvent(t, "Node", "node", "GPUHealthy", "") || len(n.taints(t)) != 0 {
		t.Error("the GPU is reported as unhealthy")
	}
	writes := 0
	for _, a := range n.client.Actions() {
		if a.GetVerb() != "get" && a.GetVerb() != "list" && a.GetVerb() != "watch" {
			writes++
		}
	}
	if writes > 5 {
		t.Errorf("1000 events led to %d writes: %v", writes, n.client.Actions())
	}
}

func TestLostGPUStaysPublished(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	gone := func() (nvidia.Node, error) {
		all, err := twoGPUs()
		all.GPUs = all.GPUs[1:]
		all.Problems = []nvidia.Problem{{PCIAddress: "0000:1b:00.0", Message: "lost"}}
		return all, err
	}
	n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: device.ReachLost, At: time.Now()}})
	eventually(t, "it is tainted", func() bool { return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/gpu-lost=:NoSchedule") })
	n.register(t)
	if msg := n.prepare(t, n.claim(t, "late", firstGPU)).GetError(); !strings.Contains(msg, firstGPU) || !strings.Contains(msg, "lost") {
		t.Errorf("a lost GPU is prepared: %q", msg)
	}
	generation := mustList(t, n.client)[0].Spec.Pool.Generation
	n.setHardware("without the first", gone)
	eventually(t, "the inventory dropped it", func() bool { return len(n.driver.inv.Snapshot().Node.GPUs) == 1 })
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.emit = nil
	n.run(t)
	eventually(t, "the restarted plugin scanned", func() bool { return len(n.driver.inv.Snapshot().Node.GPUs) == 1 })
	if s := mustList(t, n.client); len(published(t, n.client)) != 2 || s[0].Spec.Pool.Generation != generation || len(n.taints(t)) != 1 {
		t.Errorf("%v", s)
	}
	n.setHardware("card unplugged", func() (nvidia.Node, error) { all, err := gone(); all.Problems = nil; return all, err })
	eventually(t, "the unplugged card is withdrawn", func() bool { return len(published(t, n.client)) == 1 })
}

// A container on a GPU that hangs would hang too. But a GPU that nothing watches may work.
func TestHungGPUIsNotPreparedForNewClaims(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	held := n.claim(t, "held", firstGPU)
	if msg := n.prepare(t, held).GetError(); msg != "" {
		t.Fatal(msg)
	}
	send := func(reach device.Reach) {
		n.send(device.Signal{Condition: &device.Condition{Card: n.card("0000:1b:00.0"), Reach: reach, At: time.Now()}})
	}
	send(device.ReachWedged)
	eventually(t, "it is tainted", func() bool { return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/unmonitored=:None") })
	if msg := n.prepare(t, held).GetError(); msg != "" {
		t.Errorf("the claim that has it is refused: %q", msg)
	}
	n.unprepare(t, held)
	late := n.claim(t, "late", firstGPU)
	if msg := n.prepare(t, late).GetError(); !strings.Contains(msg, firstGPU) || !strings.Contains(msg, "does not answer") {
		t.Errorf("a hung GPU is prepared: %q", msg)
	}
	send(device.ReachOK)
	eventually(t, "it answers", func() bool { return n.taints(t)[firstGPU] == "" })
	n.send(device.Signal{Watcher: &device.WatcherState{Error: "it died", Released: true, At: time.Now()}})
	eventually(t, "nothing watches it", func() bool { return strings.HasPrefix(n.taints(t)[firstGPU], "gpu.nvidia.com/unmonitored=:None") })
	if msg := n.prepare(t, late).GetError(); msg != "" {
		t.Errorf("a GPU that nothing watches is refused: %q", msg)
	}
}

// When taints come and go in several slices of a pool, the pool must keep its generation. With a
// new generation the scheduler sees no device of the node until all slices are written.
func TestTaintsKeepPoolGeneration(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.setHardware("many", func() (nvidia.Node, error) {
		all, err := twoGPUs()
		for i := range 3 * device.MaxDevicesPerSlice {
			g := all.GPUs[0]
			g.PCIAddress = device.PCIAddress(fmt.Sprintf("0001:%02x:00.0", i))
			g.UUID = "GPU-" + string(g.PCIAddress)
			all.GPUs = append(all.GPUs, g)
		}
		return all, err
	})
	var mu sync.Mutex
	most := int64(0)
	prependReactor(n.client, "update", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		most = max(most, a.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice).Spec.Pool.Generation)
		return false, nil, nil
	})
	n.run(t)
	eventually(t, "all slices are published", func() bool { return len(mustList(t, n.client)) == 4 })
	generation := mustList(t, n.client)[0].Spec.Pool.Generation
	ill := []device.PCIAddress{"0000:1b:00.0", "0001:50:00.0", "0001:90:00.0", "0001:bf:00.0"}
	for _, a := range ill {
		n.xid(a, 95)
	}
	eventually(t, "all are tainted", func() bool { return len(n.taints(t)) == len(ill) })
	for _, a := range ill {
		n.recovery(a, device.RecoveryReset)
		n.recovery(a, device.RecoveryNone)
	}
	eventually(t, "all are healthy", func() bool { return len(n.taints(t)) == 0 })
	mu.Lock()
	defer mu.Unlock()
	if most != generation {
		t.Errorf("the pool's generation went from %d to %d", generation, most)
	}
}

func TestTaintsCatchUpAfterAPIServerOutage(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	var away atomic.Bool
	prependReactor(n.client, "update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		if away.Load() {
			return true, nil, apierrors.NewServiceUnavailable("away")
		}
		return false, nil, nil
	})
	n.run(t)
	away.Store(true)
	n.xid("0000:1b:00.0", 95)
	n.xid("0000:43:00.0", 79)
	n.recovery("0000:1b:00.0", device.RecoveryReset)
	eventually(t, "a write failed", func() bool { return n.metric(t, "gpu_dra_publish_errors_total") })
	n.recovery("0000:1b:00.0", device.RecoveryNone)
	away.Store(false)
	eventually(t, "the taints match the hardware", func() bool {
		all := n.taints(t)
		return len(all) == 1 && strings.Contains(all[secondGPU], "xid=79:")
	})
}

func TestAdminSetsEffectsAndRules(t *testing.T) {
	t.Parallel()
	n := newHealthNode(t)
	n.cfg.Settings.Health.Effects = map[string]health.Effect{"unhealthy": health.NoExecute}
	n.cfg.Settings.XIDRules = map[string]health.Weight{"31": health.Breaking, "79": health.Reported}
	n.run(t)
	n.xid("0000:43:00.0", 79) // the loop evaluates this XID before the next one
	n.xid("0000:1b:00.0", 31)
	eventually(t, "the taint has the configured effect", func() bool { return strings.Contains(n.taints(t)[firstGPU], "xid=31:NoExecute") })
	if all := n.taints(t); len(all) != 1 {
		t.Errorf("%v", all)
	}
	for _, wrong := range []func(*config.Config){
		func(c *config.Config) { c.Settings.Health.Effects = map[string]health.Effect{"lost": "x"} },
		func(c *config.Config) { c.Settings.XIDRules = map[string]health.Weight{"79": "x"} },
	} {
		other := newNode(t)
		wrong(other.cfg)
		parts := Parts{
			Client: other.client, StatusClient: other.client, Hardware: other.hardware(),
			Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
		}
		if _, err := New(t.Context(), other.cfg, parts); err == nil {
			t.Error("an invalid setting is accepted")
		}
	}
}
