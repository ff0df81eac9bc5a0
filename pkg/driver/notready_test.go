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
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
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
	t.Parallel()
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
	t.Parallel()
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
	n.expectEvent(t, "Node", "node", "DevicesUnavailable", " "+base+": ")

	rename(t, base, filepath.Join(t.TempDir(), "base"))
	eventually(t, "the claim is prepared", func() bool { return n.prepare(t, early).GetError() == "" })
}

func TestRestartOnUnreadyNodeKeepsTaints(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	if err := n.client.ResourceV1().ResourceClaims("team").Delete(t.Context(), held.GetName(), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the unprepared device is withdrawn", func() bool { return len(published(t, n.client)) == 0 })
	n.setCapacity(t, "0")
	eventually(t, "both are published again", func() bool { return len(published(t, n.client)) == 2 })
}

func TestRemovedDriverHasItsOwnConditionCode(t *testing.T) {
	t.Parallel()
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
	d, err := New(t.Context(), n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(),
		Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
		Watch: watchNothing, StopWorkers: noWorkers,
	})
	if err != nil {
		t.Fatal(err)
	}
	d.node.Report(nodeview.Condition{Source: "base-spec", Code: "base-spec-unwritable", Message: "disk full", Transient: true})
	d.host.Check(t.Context())
	if slices.ContainsFunc(d.node.View().Conditions, func(c nodeview.Condition) bool { return c.Source == "base-spec" }) {
		t.Errorf("the condition stays although the inventory is not ready: %+v", d.node.View().Conditions)
	}
}
