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

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// switchable is a container runtime of which CDI can be switched off.
type switchable struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	mu  sync.Mutex
	off bool
}

func (s *switchable) Status(context.Context, *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &runtimeapi.StatusResponse{Info: map[string]string{"config": fmt.Sprintf(`{"enableCDI":%v}`, !s.off)}}, nil
}

func (s *switchable) set(off bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off = off
}

// withRuntime gives the node a container runtime.
func (n *node) withRuntime(t *testing.T) *switchable {
	t.Helper()
	n.cfg.CRISocket = filepath.Join(t.TempDir(), "cri.sock")
	l, err := net.Listen("unix", n.cfg.CRISocket)
	if err != nil {
		t.Fatal(err)
	}
	s := &switchable{}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, s)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return s
}

// nudge makes the driver look at everything: the files of the hardware were made anew.
func (n *ailing) nudge(why string) {
	n.say("driver, "+why, twoGPUs)
	n.driver.inv.Doubt()
}

// capacity is what the kubelet says of the Node.
func (n *node) capacity(t *testing.T, devicePlugin string) {
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

// notReady is whether all devices have the taint, with this value.
func (n *ailing) notReady(t *testing.T, value string) bool {
	t.Helper()
	taints := n.taints(t)
	for _, name := range published(t, n.client) {
		if !strings.Contains(taints[name], "gpu.nvidia.com/not-ready="+value+":NoSchedule@") {
			return false
		}
	}
	return len(taints) > 0
}

func TestProvenConditionsTaintAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		value string
		shut  func(t *testing.T, n *ailing, cri *switchable)
		open  func(t *testing.T, n *ailing, cri *switchable)
		says  string
	}{
		"no CDI": {
			"cdi-disabled",
			func(_ *testing.T, n *ailing, r *switchable) { r.set(true); n.nudge("off") },
			func(_ *testing.T, n *ailing, r *switchable) { r.set(false); n.nudge("on") },
			"enable_cdi",
		},
		"no hook": {
			"hook-missing",
			func(t *testing.T, n *ailing, _ *switchable) {
				rename(t, n.cfg.HookSource, n.cfg.HookSource+".away")
				rename(t, n.cfg.HookPath, n.cfg.HookPath+".away")
				n.nudge("no hook")
			},
			func(t *testing.T, n *ailing, _ *switchable) {
				rename(t, n.cfg.HookSource+".away", n.cfg.HookSource)
				n.nudge("hook")
			},
			"hook",
		},
		"released": {
			"hardware-released",
			func(t *testing.T, n *ailing, _ *switchable) {
				n.change(t, nil, map[string]string{releaseAnnotation: "true"})
			},
			func(t *testing.T, n *ailing, _ *switchable) { n.change(t, nil, nil) },
			"let go of",
		},
		"device plugin": {
			"device-plugin",
			func(t *testing.T, n *ailing, _ *switchable) { n.capacity(t, "8") },
			func(t *testing.T, n *ailing, _ *switchable) { n.capacity(t, "0") },
			"device plugin",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newAiling(t)
			cri := n.withRuntime(t)
			n.cfg.HookSource = filepath.Join(t.TempDir(), "hook")
			if err := os.WriteFile(n.cfg.HookSource, []byte("hook"), 0o755); err != nil {
				t.Fatal(err)
			}
			n.run(t)
			n.register(t)
			eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
			generation := mustList(t, n.client)[0].Spec.Pool.Generation

			c.shut(t, n, cri)
			eventually(t, "all have the taint", func() bool { return n.notReady(t, c.value) })
			if len(published(t, n.client)) != 2 || mustList(t, n.client)[0].Spec.Pool.Generation != generation {
				t.Error("the pool is another one")
			}
			if !n.metric(t, "gpu_dra_tainted_devices effect=NoSchedule key=not-ready") {
				t.Error("the metric does not count it")
			}
			early := n.claim(t, "early", firstGPU)
			if msg := n.prepare(t, early).GetError(); !strings.Contains(msg, c.says) {
				t.Errorf("prepared: %q", msg)
			}

			c.open(t, n, cri)
			eventually(t, "the taints go", func() bool { return len(n.taints(t)) == 0 })
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

func TestABaseSpecThatCannotBeWrittenClosesTheNode(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.register(t)
	eventually(t, "the plugin is ready", func() bool { return n.probe.isReady(t.Context()) == nil })
	// Nothing can be renamed to a directory that is not empty, not even by root.
	base := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json")
	rename(t, base, base+".away")
	if err := os.MkdirAll(filepath.Join(base, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	n.nudge("no base spec")
	eventually(t, "readyz says so", func() bool {
		err := n.probe.isReady(t.Context())
		return err != nil && strings.Contains(err.Error(), "node-wide CDI spec cannot be written")
	})
	early := n.claim(t, "early", firstGPU)
	if msg := n.prepare(t, early).GetError(); !strings.Contains(msg, "node-wide CDI spec cannot be written") {
		t.Errorf("prepared: %q", msg)
	}
	if all := n.driver.readiness.Conditions(); len(all) != 1 || all[0].code != "base-spec-unwritable" || !all[0].passing {
		t.Errorf("%+v", all)
	}
	if got := n.taints(t); len(got) > 0 {
		t.Errorf("it may pass: %v", got)
	}
	n.hears(t, "Node", "node", "DevicesUnavailable", "cannot be written: write CDI spec: rename "+base+":")

	rename(t, base, filepath.Join(t.TempDir(), "base"))
	eventually(t, "the claim is prepared", func() bool { return n.prepare(t, early).GetError() == "" })
}

func TestARestartOnAnUnreadyNodeTaints(t *testing.T) {
	n := newAiling(t)
	cri := n.withRuntime(t)
	n.run(t)
	eventually(t, "both are published", func() bool { return len(published(t, n.client)) == 2 })
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	cri.set(true)
	n.begin(t)
	eventually(t, "all have the taint", func() bool { return n.notReady(t, "cdi-disabled") })
	first := n.taints(t)[firstGPU]
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	updates := stored(n.client)["update"]
	n.begin(t)
	eventually(t, "the next instance publishes", func() bool { return n.metric(t, "gpu_dra_tainted_devices effect=NoSchedule key=not-ready") })
	if now := n.taints(t)[firstGPU]; now != first || stored(n.client)["update"] != updates {
		t.Errorf("%q after %q, %d writes", now, first, stored(n.client)["update"]-updates)
	}
	cri.set(false)
	n.nudge("on")
	eventually(t, "the taints go", func() bool { return len(n.taints(t)) == 0 && len(published(t, n.client)) == 2 })
}

func TestWithoutTaintsAnUnreadyNodeIsWithdrawn(t *testing.T) {
	n := newAiling(t)
	n.client.PrependReactor("*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
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
	n.capacity(t, "8")
	eventually(t, "what no claim holds is withdrawn", func() bool { return slices.Equal(published(t, n.client), []string{firstGPU}) })
	if msg := n.unprepare(t, held); msg != "" {
		t.Error(msg)
	}
	eventually(t, "what was held is withdrawn", func() bool { return len(published(t, n.client)) == 0 })
	n.capacity(t, "0")
	eventually(t, "both are published again", func() bool { return len(published(t, n.client)) == 2 })
}

// unready is a publisher with the driver's own marks, of a node whose inventory a test says.
type unready struct {
	client    *fake.Clientset
	inv       *fakeInventory
	readiness *readiness
	changed   chan struct{}
	stop      func()
}

// publishes starts a publisher on what the API server has. It must be in a bubble.
func publishes(t *testing.T, client *fake.Clientset, s inventory.Snapshot) *unready {
	t.Helper()
	u := &unready{client: client, inv: &fakeInventory{}, changed: make(chan struct{}, 1)}
	u.inv.set(s)
	u.readiness = newReadiness(u.inv, func() { wake(u.changed) })
	d := &Driver{readiness: u.readiness, health: newHealthWatch(nil, nil, t.TempDir(), "boot", u.readiness), metrics: metrics.New("test")}
	p := &publisher{
		client: client, nodeName: "node", inv: u.readiness, slices: wholeGPUs, onVersion: func(string) {}, mark: d.marked, due: u.readiness.Due,
		onError: func(_ context.Context, err error, msg string) { t.Errorf("%s: %v", msg, err) },
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.publish(ctx, u.changed) }()
	u.stop = sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return u
}

// becomes is what the inventory says from now on.
func (u *unready) becomes(s inventory.Snapshot) {
	u.inv.set(s)
	wake(u.changed)
}

func (u *unready) values(t *testing.T) map[string]int {
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

// away is a node that was seen, and whose driver has been away since then.
func away(s inventory.Snapshot) inventory.Snapshot {
	s.Ready, s.Reason, s.Code, s.Since = false, "no driver", inventory.CodeDriverMissing, time.Now()
	return s
}

func TestWhatMayPassIsTaintedAfterHalfAMinute(t *testing.T) {
	baseSpec := condition{source: "base-spec", code: codeBaseSpec, message: "disk full", passing: true}
	for name, c := range map[string]struct {
		shut, open func(u *unready)
		want       string
	}{
		"the driver is away": {
			func(u *unready) { u.becomes(away(manyGPUs())) }, func(u *unready) { u.becomes(manyGPUs()) }, "driver-missing",
		},
		"the base spec cannot be written": {
			func(u *unready) { u.readiness.Report(baseSpec) }, func(u *unready) { u.readiness.Clear("base-spec") }, "base-spec-unwritable",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := publishes(t, apiServer(), manyGPUs())
				defer u.stop()
				passes(time.Minute)
				before := stored(u.client)["update"]

				c.shut(u)
				passes(29 * time.Second)
				c.open(u)
				passes(time.Minute)
				if now := stored(u.client)["update"]; now != before {
					t.Errorf("%d writes for what has passed", now-before)
				}

				began := time.Now()
				c.shut(u)
				passes(29 * time.Second)
				if got := u.values(t); len(got) > 0 {
					t.Errorf("too early: %v", got)
				}
				passes(5 * time.Second)
				if got := u.values(t); got["not-ready="+c.want] != 70 || len(got) != 1 {
					t.Fatalf("%v", got)
				}
				for range 5 { // what happens meanwhile writes nothing
					wake(u.changed)
					passes(time.Minute)
				}
				all := mustList(t, u.client)
				for _, s := range all {
					if s.Spec.Pool.Generation != 1 || !s.Spec.Devices[0].Taints[0].TimeAdded.Time.Equal(began) {
						t.Errorf("%+v, %+v", s.Spec.Pool, s.Spec.Devices[0].Taints)
					}
				}
				if now := stored(u.client)["update"]; now != before+len(all) {
					t.Errorf("%d writes for %d slices", now-before, len(all))
				}

				c.open(u)
				passes(5 * time.Second)
				if got := u.values(t); len(got) > 0 || len(published(t, u.client)) != 70 {
					t.Errorf("ready again: %v", got)
				}
			})
		})
	}
}

// A node that refuses for another reason goes on being tainted: Pods that come in between would hang.
func TestAConditionThatBeganUnderAnotherIsShownWhenThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := publishes(t, apiServer(), manyGPUs())
		defer u.stop()
		passes(time.Minute)
		u.readiness.Report(condition{source: "release", code: codeReleased, message: "released"})
		passes(10 * time.Second)
		untainted := 0
		u.client.PrependReactor("update", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
			for _, d := range a.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
				if len(d.Taints) == 0 {
					untainted++
				}
			}
			return false, nil, nil
		})

		u.becomes(away(manyGPUs()))
		passes(5 * time.Second)
		if got := u.values(t); got["not-ready=hardware-released"] != 70 {
			t.Errorf("the driver is away too: %v", got)
		}
		u.readiness.Clear("release")
		passes(5 * time.Second)
		if got := u.values(t); got["not-ready=driver-missing"] != 70 || untainted > 0 {
			t.Errorf("the driver is still away: %v, and %d devices were written without a taint", got, untainted)
		}

		u.becomes(manyGPUs())
		passes(5 * time.Second)
		if got := u.values(t); len(got) > 0 {
			t.Errorf("ready again: %v", got)
		}
		u.becomes(away(manyGPUs()))
		passes(29 * time.Second)
		if got := u.values(t); len(got) > 0 {
			t.Errorf("what comes later may pass: %v", got)
		}
	})
}

// unknown is a node of which the plugin has not seen anything since its start.
func unknown() inventory.Snapshot {
	return inventory.Snapshot{Reason: "no driver", Code: inventory.CodeDriverMissing, Since: time.Now()}
}

func TestSlicesOfAnEarlierInstanceAreAdoptedWhileNothingIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := apiServer()
		earlier := publishes(t, client, manyGPUs())
		passes(time.Minute)
		earlier.stop()
		ill := mustList(t, client)[0]
		ill.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: taintPrefix + "unhealthy", Value: "xid-79", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		if _, err := client.ResourceV1().ResourceSlices().Update(t.Context(), &ill, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}

		u := publishes(t, client, unknown())
		passes(29 * time.Second)
		if got := u.values(t); len(got) != 1 {
			t.Errorf("too early: %v", got)
		}
		passes(10 * time.Second)
		want := map[string]int{"not-ready=driver-missing": 70, "unhealthy=xid-79": 1}
		if got := u.values(t); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v", got)
		}
		u.stop()

		// The next one knows no more, and has nothing to write: not for now, and not later.
		before := stored(client)["update"]
		u = publishes(t, client, unknown())
		defer u.stop()
		passes(5 * time.Minute)
		if got, now := u.values(t), stored(client)["update"]; fmt.Sprint(got) != fmt.Sprint(want) || now != before {
			t.Errorf("%v after %d writes", got, now-before)
		}
		u.becomes(manyGPUs())
		passes(10 * time.Second)
		if got := u.values(t); len(got) > 0 || len(published(t, client)) != 70 {
			t.Errorf("ready again: %v", got)
		}
	})
}

func TestANodeWithoutSlicesPublishesNothingBeforeItIsReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := apiServer()
		u := publishes(t, client, unknown())
		defer u.stop()
		passes(time.Hour)
		if got := stored(client); len(got) > 0 {
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
		u.becomes(manyGPUs())
		passes(10 * time.Second)
		if got := len(published(t, client)); got != 70 {
			t.Errorf("%d devices", got)
		}
	})
}

func TestADriverThatGoesTaintsByItsOwnCode(t *testing.T) {
	n := newAiling(t)
	n.run(t)
	n.say("none", func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no driver"} })
	eventually(t, "the condition is there", func() bool {
		all := n.driver.readiness.Conditions()
		return len(all) == 1 && all[0].code == "driver-missing" && all[0].passing && time.Since(all[0].since) < 20*time.Second
	})
}

func TestTheBaseSpecsConditionEndsWhereTheSpecIsNotWritten(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Metrics: metrics.New("test")})
	if err != nil {
		t.Fatal(err)
	}
	d.readiness.Report(condition{source: "base-spec", code: codeBaseSpec, message: "disk full", passing: true})
	files := ""
	if d.writeBase(&files); d.readiness.Blocked() {
		t.Errorf("the inventory is not ready, and the condition stays: %+v", d.readiness.Conditions())
	}
}
