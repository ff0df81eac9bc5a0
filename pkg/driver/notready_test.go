package driver

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/health/loop"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// fakeCRI fakes a container runtime. cdiOff switches off its CDI support.
type fakeCRI struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	mu     sync.Mutex
	cdiOff bool
}

func (s *fakeCRI) Status(context.Context, *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &runtimeapi.StatusResponse{Info: map[string]string{"config": fmt.Sprintf(`{"enableCDI":%v}`, !s.cdiOff)}}, nil
}

func (s *fakeCRI) setCDIOff(off bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cdiOff = off
}

// startCRI starts a fakeCRI and makes the driver use it.
func (n *node) startCRI(t *testing.T) *fakeCRI {
	t.Helper()
	n.cfg.CRISocket = filepath.Join(t.TempDir(), "cri.sock")
	l, err := net.Listen("unix", n.cfg.CRISocket)
	if err != nil {
		t.Fatal(err)
	}
	s := &fakeCRI{}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, s)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return s
}

// rescan makes the inventory scan the hardware again, with the text why as the new fingerprint of
// the device nodes. A new fingerprint makes the driver look at the CDI hook, the base spec and the
// container runtime again, so why must be new in each call.
func (n *healthNode) rescan(why string) {
	n.setHardware("driver, "+why, twoGPUs)
	n.driver.inv.RequestScan()
}

// setCapacity sets the amount of nvidia.com/gpu in the Node's capacity, as NVIDIA's device plugin
// does.
func (n *node) setCapacity(t *testing.T, devicePlugin string) {
	t.Helper()
	node, err := n.client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(devicePlugin)}
	if _, err := n.client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// allNotReady reports whether all published devices have the taint not-ready with this value.
func (n *healthNode) allNotReady(t *testing.T, value string) bool {
	t.Helper()
	taints := n.taints(t)
	for _, name := range published(t, n.client) {
		if !strings.Contains(taints[name], "gpu.nvidia.com/not-ready="+value+":NoSchedule@") {
			return false
		}
	}
	return len(taints) > 0
}

func TestPersistentConditionsTaintAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		value string
		shut  func(t *testing.T, n *healthNode, cri *fakeCRI)
		open  func(t *testing.T, n *healthNode, cri *fakeCRI)
		says  string
	}{
		"no CDI": {
			"cdi-disabled",
			func(_ *testing.T, n *healthNode, r *fakeCRI) { r.setCDIOff(true); n.rescan("off") },
			func(_ *testing.T, n *healthNode, r *fakeCRI) { r.setCDIOff(false); n.rescan("on") },
			"enable_cdi",
		},
		"no hook": {
			"hook-missing",
			func(t *testing.T, n *healthNode, _ *fakeCRI) {
				rename(t, n.cfg.HookSource, n.cfg.HookSource+".away")
				rename(t, n.cfg.HookPath, n.cfg.HookPath+".away")
				n.rescan("no hook")
			},
			func(t *testing.T, n *healthNode, _ *fakeCRI) {
				rename(t, n.cfg.HookSource+".away", n.cfg.HookSource)
				n.rescan("hook")
			},
			"hook",
		},
		"released": {
			"hardware-released",
			func(t *testing.T, n *healthNode, _ *fakeCRI) {
				n.editNode(t, nil, map[string]string{quiesce.Annotation: "true"})
			},
			func(t *testing.T, n *healthNode, _ *fakeCRI) { n.editNode(t, nil, nil) },
			"released for a driver upgrade",
		},
		"device plugin": {
			"device-plugin",
			func(t *testing.T, n *healthNode, _ *fakeCRI) { n.setCapacity(t, "8") },
			func(t *testing.T, n *healthNode, _ *fakeCRI) { n.setCapacity(t, "0") },
			"device plugin",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			cri := n.startCRI(t)
			n.cfg.HookSource = filepath.Join(t.TempDir(), "hook")
			if err := os.WriteFile(n.cfg.HookSource, []byte("hook"), 0o755); err != nil {
				t.Fatal(err)
			}
			n.run(t)
			n.register(t)
			eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
			generation := mustList(t, n.client)[0].Spec.Pool.Generation

			c.shut(t, n, cri)
			eventually(t, "all have the taint", func() bool { return n.allNotReady(t, c.value) })
			if len(published(t, n.client)) != 2 || mustList(t, n.client)[0].Spec.Pool.Generation != generation {
				t.Error("the pool changed")
			}
			if !n.metric(t, "gpu_dra_tainted_devices effect=NoSchedule key=not-ready") {
				t.Error("the metric does not count the taints")
			}
			early := n.claim(t, "early", firstGPU)
			if msg := n.prepare(t, early).GetError(); !strings.Contains(msg, c.says) {
				t.Errorf("prepared: %q", msg)
			}

			c.open(t, n, cri)
			eventually(t, "the taints are removed", func() bool { return len(n.taints(t)) == 0 })
			eventually(t, "the claim is prepared", func() bool { return n.prepare(t, early).GetError() == "" })
		})
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func TestUnwritableBaseSpecMakesNodeUnready(t *testing.T) {
	n := newHealthNode(t)
	n.run(t)
	n.register(t)
	eventually(t, "the plugin is ready", func() bool { return n.probe.isReady(t.Context()) == nil })
	// The test puts a directory that is not empty in place of the base spec. Even root cannot rename a
	// file to such a directory, so the driver cannot write the base spec.
	base := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json")
	rename(t, base, base+".away")
	if err := os.MkdirAll(filepath.Join(base, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	n.rescan("no base spec")
	eventually(t, "readyz reports it", func() bool {
		err := n.probe.isReady(t.Context())
		return err != nil && strings.Contains(err.Error(), "cannot write the node-wide CDI spec")
	})
	early := n.claim(t, "early", firstGPU)
	if msg := n.prepare(t, early).GetError(); !strings.Contains(msg, "cannot write the node-wide CDI spec") {
		t.Errorf("prepared: %q", msg)
	}
	if all := n.driver.node.View().Conditions; len(all) != 1 || all[0].Code != "base-spec-unwritable" || !all[0].Transient {
		t.Errorf("%+v", all)
	}
	if got := n.taints(t); len(got) > 0 {
		t.Errorf("a transient condition set taints: %v", got)
	}
	n.expectEvent(t, "Node", "node", "DevicesUnavailable", "cannot write the node-wide CDI spec: write CDI spec: rename "+base+":")

	rename(t, base, filepath.Join(t.TempDir(), "base"))
	eventually(t, "the claim is prepared", func() bool { return n.prepare(t, early).GetError() == "" })
}

func TestRestartOnUnreadyNodeKeepsTaints(t *testing.T) {
	n := newHealthNode(t)
	cri := n.startCRI(t)
	n.run(t)
	eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	cri.setCDIOff(true)
	n.startPlugin(t)
	eventually(t, "all have the taint", func() bool { return n.allNotReady(t, "cdi-disabled") })
	first := n.taints(t)[firstGPU]
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	updates := storedWrites(n.client)["update"]
	n.startPlugin(t)
	eventually(t, "the next instance publishes", func() bool { return n.metric(t, "gpu_dra_tainted_devices effect=NoSchedule key=not-ready") })
	if now := n.taints(t)[firstGPU]; now != first || storedWrites(n.client)["update"] != updates {
		t.Errorf("%q after %q, %d writes", now, first, storedWrites(n.client)["update"]-updates)
	}
	cri.setCDIOff(false)
	n.rescan("on")
	eventually(t, "the taints are removed", func() bool { return len(n.taints(t)) == 0 && len(published(t, n.client)) == 2 })
}

func TestUnreadyNodeIsWithdrawnWithoutTaintSupport(t *testing.T) {
	n := newHealthNode(t)
	prependReactor(n.client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if written, ok := a.(interface{ GetObject() runtime.Object }); ok {
			for i := range written.GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
				written.GetObject().(*resourceapi.ResourceSlice).Spec.Devices[i].Taints = nil
			}
		}
		return false, nil, nil
	})
	n.run(t)
	n.register(t)
	eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
	held := n.claim(t, "held", firstGPU)
	if msg := n.prepare(t, held).GetError(); msg != "" {
		t.Fatal(msg)
	}
	n.setCapacity(t, "8")
	eventually(t, "the free device is withdrawn", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
	if msg := n.unprepare(t, held); msg != "" {
		t.Error(msg)
	}
	eventually(t, "the unprepared device is withdrawn", func() bool { return len(published(t, n.client)) == 0 })
	n.setCapacity(t, "0")
	eventually(t, "both are published again", func() bool { return len(published(t, n.client)) == 2 })
}

// publishingNode has a publisher that adds the driver's own taints, a fake inventory and a fake API
// server.
type publishingNode struct {
	client     *fake.Clientset
	inv        *fakeInventory
	conditions *nodeview.Conditions
	changed    chan struct{}
	stop       func()
}

// startPublishingNode starts a publisher with the snapshot s. The caller must be in a synctest
// bubble.
func startPublishingNode(t *testing.T, client *fake.Clientset, s inventory.Snapshot) *publishingNode {
	t.Helper()
	u := &publishingNode{
		client: client, inv: &fakeInventory{}, conditions: nodeview.NewConditions(), changed: make(chan struct{}, 1),
	}
	u.inv.set(s)
	h := unwatched(t)
	d := &Driver{node: newNodeView(t, u.inv, u.conditions, h), health: h, metrics: metrics.New("test")}
	p := &publisher{
		client: client, nodeName: "node", inv: offered{d.node}, slices: wholeGPUs, onVersion: func(string) {},
		mark: d.markSlices, conditionsDue: func(now time.Time) (due, pending bool) { return d.node.Refresh().Due(now) },
		onError: func(_ context.Context, err error, msg string) { t.Errorf("%s: %v", msg, err) },
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.publish(ctx, u.changed) }()
	var following sync.WaitGroup
	following.Go(func() { d.node.Run(ctx) })
	following.Go(func() { d.wakeForNewViews(ctx, u.changed) })
	u.stop = sync.OnceFunc(func() {
		stop()
		following.Wait()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return u
}

// unwatched returns the health of a node whose hardware nothing watches.
func unwatched(t *testing.T) *loop.Loop {
	t.Helper()
	return loop.New(loop.Options{StateDir: t.TempDir(), BootID: "boot"})
}

// newNodeView returns the view of a node on which NVIDIA's DRA driver never ran.
func newNodeView(t *testing.T, inv nodeview.Inventory, c *nodeview.Conditions, h nodeview.Health) *nodeview.Node {
	t.Helper()
	return nodeview.New(inv, c, h, predecessor.NewStore(t.TempDir(), t.TempDir(), DriverName, "boot", durable.OS{}))
}

// setInventory sets the snapshot of the fake inventory.
func (u *publishingNode) setInventory(s inventory.Snapshot) { u.inv.set(s) }

func (u *publishingNode) taintValues(t *testing.T) map[string]int {
	t.Helper()
	values := map[string]int{}
	for _, s := range mustList(t, u.client) {
		for _, d := range s.Spec.Devices {
			for _, taint := range d.Taints {
				values[strings.TrimPrefix(taint.Key, taintPrefix)+"="+taint.Value]++
			}
		}
	}
	return values
}

// withoutDriver returns the snapshot s after the node has lost its GPU driver.
func withoutDriver(s inventory.Snapshot) inventory.Snapshot {
	s.Ready, s.Reason, s.Code, s.Since = false, "no driver", inventory.CodeDriverMissing, time.Now()
	return s
}

func TestTransientConditionTaintsAfterGrace(t *testing.T) {
	baseSpec := nodeview.Condition{Source: "base-spec", Code: nodeview.CodeBaseSpec, Message: "disk full", Transient: true}
	for name, c := range map[string]struct {
		shut, open func(u *publishingNode)
		want       string
	}{
		"the driver is away": {
			func(u *publishingNode) { u.setInventory(withoutDriver(manyGPUs())) },
			func(u *publishingNode) { u.setInventory(manyGPUs()) },
			"driver-missing",
		},
		"the base spec cannot be written": {
			func(u *publishingNode) { u.conditions.Report(baseSpec) },
			func(u *publishingNode) { u.conditions.Clear("base-spec") },
			"base-spec-unwritable",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := startPublishingNode(t, apiServer(), manyGPUs())
				defer u.stop()
				advance(time.Minute)
				before := storedWrites(u.client)["update"]

				c.shut(u)
				advance(29 * time.Second)
				c.open(u)
				advance(time.Minute)
				if now := storedWrites(u.client)["update"]; now != before {
					t.Errorf("%d writes for a condition that ended early", now-before)
				}

				began := time.Now()
				c.shut(u)
				advance(29 * time.Second)
				if got := u.taintValues(t); len(got) > 0 {
					t.Errorf("too early: %v", got)
				}
				advance(5 * time.Second)
				if got := u.taintValues(t); got["not-ready="+c.want] != 70 || len(got) != 1 {
					t.Fatalf("%v", got)
				}
				for range 5 { // a later change must write nothing
					wake(u.changed)
					advance(time.Minute)
				}
				all := mustList(t, u.client)
				for _, s := range all {
					if s.Spec.Pool.Generation != 1 || !s.Spec.Devices[0].Taints[0].TimeAdded.Time.Equal(began) {
						t.Errorf("%+v, %+v", s.Spec.Pool, s.Spec.Devices[0].Taints)
					}
				}
				if now := storedWrites(u.client)["update"]; now != before+len(all) {
					t.Errorf("%d writes for %d slices", now-before, len(all))
				}

				c.open(u)
				advance(5 * time.Second)
				if got := u.taintValues(t); len(got) > 0 || len(published(t, u.client)) != 70 {
					t.Errorf("ready again: %v", got)
				}
			})
		})
	}
}

// When a second condition begins before the first one ends, the devices must never be without a
// taint. Pods that are scheduled in a gap between two taints would hang.
func TestOverlappingConditionTaintsWithoutGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := startPublishingNode(t, apiServer(), manyGPUs())
		defer u.stop()
		advance(time.Minute)
		u.conditions.Report(nodeview.Condition{Source: "release", Code: nodeview.CodeReleased, Message: "released"})
		advance(10 * time.Second)
		untainted := 0
		prependReactor(u.client, "update", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			for _, d := range a.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
				if len(d.Taints) == 0 {
					untainted++
				}
			}
			return false, nil, nil
		})

		u.setInventory(withoutDriver(manyGPUs()))
		advance(5 * time.Second)
		if got := u.taintValues(t); got["not-ready=hardware-released"] != 70 {
			t.Errorf("while both conditions last: %v", got)
		}
		u.conditions.Clear("release")
		advance(5 * time.Second)
		if got := u.taintValues(t); got["not-ready=driver-missing"] != 70 || untainted > 0 {
			t.Errorf("after the first condition: %v, and %d devices were written without a taint", got, untainted)
		}

		u.setInventory(manyGPUs())
		advance(5 * time.Second)
		if got := u.taintValues(t); len(got) > 0 {
			t.Errorf("ready again: %v", got)
		}
		u.setInventory(withoutDriver(manyGPUs()))
		advance(29 * time.Second)
		if got := u.taintValues(t); len(got) > 0 {
			t.Errorf("a later transient condition set taints early: %v", got)
		}
	})
}

// neverScanned returns the snapshot of a plugin that has not scanned the hardware since its start.
func neverScanned() inventory.Snapshot {
	return inventory.Snapshot{Reason: "no driver", Code: inventory.CodeDriverMissing, Since: time.Now()}
}

func TestUnscannedNodeAdoptsEarlierSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := apiServer()
		earlier := startPublishingNode(t, client, manyGPUs())
		advance(time.Minute)
		earlier.stop()
		ill := mustList(t, client)[0]
		ill.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{
			Key: taintPrefix + "unhealthy", Value: "xid-79", Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}}
		if _, err := client.ResourceV1().ResourceSlices().Update(t.Context(), &ill, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}

		u := startPublishingNode(t, client, neverScanned())
		advance(29 * time.Second)
		if got := u.taintValues(t); len(got) != 1 {
			t.Errorf("too early: %v", got)
		}
		advance(10 * time.Second)
		want := map[string]int{"not-ready=driver-missing": 70, "unhealthy=xid-79": 1}
		if got := u.taintValues(t); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v", got)
		}
		u.stop()

		// This plugin instance has never scanned the hardware, so it must leave all published slices as
		// they are.
		before := storedWrites(client)["update"]
		u = startPublishingNode(t, client, neverScanned())
		defer u.stop()
		advance(5 * time.Minute)
		if got, now := u.taintValues(t), storedWrites(client)["update"]; fmt.Sprint(got) != fmt.Sprint(want) || now != before {
			t.Errorf("%v after %d writes", got, now-before)
		}
		u.setInventory(manyGPUs())
		advance(10 * time.Second)
		if got := u.taintValues(t); len(got) > 0 || len(published(t, client)) != 70 {
			t.Errorf("ready again: %v", got)
		}
	})
}

func TestNewNodePublishesNothingUntilReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := apiServer()
		u := startPublishingNode(t, client, neverScanned())
		defer u.stop()
		advance(time.Hour)
		if got := storedWrites(client); len(got) > 0 {
			t.Errorf("%v", got)
		}
		lists := 0
		for _, a := range client.Actions() {
			if a.GetVerb() == "list" {
				lists++
			}
		}
		if lists > 1 {
			t.Errorf("%d lists", lists)
		}
		u.setInventory(manyGPUs())
		advance(10 * time.Second)
		if got := len(published(t, client)); got != 70 {
			t.Errorf("%d devices", got)
		}
	})
}

func TestRemovedDriverHasItsOwnConditionCode(t *testing.T) {
	n := newHealthNode(t)
	n.run(t)
	n.setHardware("none", func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver"} })
	eventually(t, "the condition is reported", func() bool {
		all := n.driver.node.View().Conditions
		return len(all) == 1 && all[0].Code == "driver-missing" && all[0].Transient && time.Since(all[0].Since) < 20*time.Second
	})
}

func TestBaseSpecConditionClearsWhenSpecIsNotWritten(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Metrics: metrics.New("test")})
	if err != nil {
		t.Fatal(err)
	}
	d.node.Conditions().Report(nodeview.Condition{Source: "base-spec", Code: nodeview.CodeBaseSpec, Message: "disk full", Transient: true})
	files := ""
	if d.writeBaseSpec(&files); d.node.Refresh().Blocked() {
		t.Errorf("the condition stays although the inventory is not ready: %+v", d.node.Refresh().Conditions)
	}
}

// advance lets the simulated time d pass.
func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // simulated time
	synctest.Wait()
}
