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
	"google.golang.org/grpc/credentials/insecure"
	appsv1 "k8s.io/api/apps/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/uninstall"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// node is a simulated node: a temporary directory, and a driver with a fake API server and fake
// hardware.
type node struct {
	cfg    *config.Config
	client *fake.Clientset
	probe  *Probe
	stop   func() error
	// partitions fakes the interface that changes GPUs.
	partitions steps.Partitions

	mu   sync.Mutex
	scan func() (nvidia.Node, error)
	seen string
}

// hardware returns the fake hardware that setHardware set.
func (n *node) hardware() inventory.Hardware {
	return inventory.Hardware{
		Scan: func(context.Context) (nvidia.Node, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.scan()
		},
		Fingerprint: func() string { n.mu.Lock(); defer n.mu.Unlock(); return n.seen },
		Present:     func() (bool, error) { return true, nil },
	}
}

func (n *node) setHardware(seen string, scan func() (nvidia.Node, error)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen, n.scan = seen, scan
}

// twoGPUs returns a scan result with two GPUs. It uses /dev/null and /dev/zero as their device
// nodes, because the driver checks that device nodes exist.
func twoGPUs() (nvidia.Node, error) {
	gpu := func(address device.PCIAddress, path string) nvidia.GPU {
		return nvidia.GPU{
			GPU:   device.GPU{PCIAddress: address, UUID: "GPU-" + string(address), MemoryBytes: 80 << 30},
			Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: path}}},
		}
	}
	return nvidia.Node{
		Driver: device.Driver{Version: "580.65.06", CUDAVersion: "13.0"},
		GPUs:   []nvidia.GPU{gpu("0000:1b:00.0", "/dev/null"), gpu("0000:43:00.0", "/dev/zero")},
		Common: specs.ContainerEdits{Env: []string{"NODE=wide"}, DeviceNodes: []*specs.DeviceNode{{Path: "/dev/full"}}},
	}, nil
}

func daemonSet() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "plugin"}}
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.NodeName, cfg.Namespace, cfg.DaemonSetName, cfg.PodUID = "node", "gpu", "plugin", "uid"
	cfg.PluginDir = filepath.Join(dir, "plugin")
	cfg.RegistrarDir = filepath.Join(dir, "registry")
	cfg.CDIRoot = filepath.Join(dir, "cdi")
	cfg.HookSource, cfg.MPSHookSource = "/bin/true", "/bin/true"
	cfg.HookDirs = []string{filepath.Join(cfg.PluginDir, "bin")}
	cfg.HookPath = filepath.Join(cfg.HookDirs[0], "hooks-1", "nvidia-cdi-hook")
	cfg.DriverRootMount = cfg.DriverRoot
	for _, d := range []string{cfg.StateDir(), cfg.RegistrarDir, cfg.CDIRoot} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	client := apiServer()
	if err := client.Tracker().Add(daemonSet()); err != nil {
		t.Fatal(err)
	}
	n := &node{cfg: cfg, client: client, probe: NewProbe(), partitions: preparetest.NoPartitions{}}
	n.setHardware("driver", twoGPUs)
	return n
}

func (n *node) start(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	d, err := New(ctx, n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(), Partitions: n.partitions, Metrics: metrics.New("test"),
		Watch: watchNothing, StopWorkers: noWorkers,
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx, n.probe) }()
	n.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = n.stop() })
	eventually(t, "the plugin serves its sockets", func() bool {
		err := n.probe.isReady(t.Context())
		return n.serves() && (err == nil || err.Error() != "starting")
	})
}

// serves reports whether the plugin accepts connections on its registration socket. The socket file
// alone does not prove that a process listens on it.
func (n *node) serves() bool {
	conn, err := net.Dial("unix", only(filepath.Join(n.cfg.RegistrarDir, "gpu.nvidia.com-*-reg.sock")))
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}

// only returns the path of the only file that matches the pattern, or the pattern.
func only(pattern string) string {
	if found, err := filepath.Glob(pattern); err == nil && len(found) == 1 {
		return found[0]
	}
	return pattern
}

func dial(t *testing.T, path string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// register registers the plugin like a kubelet that has found the plugin's socket.
func (n *node) register(t *testing.T) {
	t.Helper()
	client := registerapi.NewRegistrationClient(dial(t, only(filepath.Join(n.cfg.RegistrarDir, "gpu.nvidia.com-*-reg.sock"))))
	info, err := client.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil || info.GetName() != DriverName {
		t.Fatalf("got %v, %v", info, err)
	}
	if _, err := client.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
}

func (n *node) dra(t *testing.T) drapb.DRAPluginClient {
	t.Helper()
	return drapb.NewDRAPluginClient(dial(t, only(filepath.Join(n.cfg.PluginDir, "dra-*.sock"))))
}

func (n *node) claim(t *testing.T, name string, devices ...string) *drapb.Claim {
	t.Helper()
	c := &drapb.Claim{Namespace: "team", Name: name, Uid: "uid-" + name}
	n.claimAs(t, c, devices...)
	return c
}

// claimAs creates the claim in the API server. Its allocation result has the devices, and it is
// reserved for one Pod.
func (n *node) claimAs(t *testing.T, as *drapb.Claim, devices ...string) {
	t.Helper()
	name := as.GetName()
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: as.GetNamespace(), Name: name, UID: types.UID(as.GetUid())},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{
				Resource: "pods", Name: "user-of-" + name, UID: types.UID("user-of-" + name),
			}},
		},
	}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Driver: DriverName, Pool: "node", Device: d, Request: "gpu"})
	}
	if _, err := n.client.ResourceV1().ResourceClaims("team").Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (n *node) prepare(t *testing.T, c *drapb.Claim) *drapb.NodePrepareResourceResponse {
	t.Helper()
	r, err := n.dra(t).NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetClaims()[c.GetUid()]
}

func (n *node) unprepare(t *testing.T, c *drapb.Claim) string {
	t.Helper()
	r, err := n.dra(t).NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetClaims()[c.GetUid()].GetError()
}

func (n *node) cdiFiles(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(n.cfg.CDIRoot)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestClaimLifecycleOnANode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	if err := n.probe.isReady(t.Context()); err == nil || !strings.Contains(err.Error(), "kubelet") {
		t.Errorf("ready before the kubelet knows the plugin: %v", err)
	}
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	eventually(t, "the plugin is ready", func() bool { return n.probe.isReady(t.Context()) == nil })

	first, second := n.claim(t, "first", "gpu-0000-1b-00-0"), n.claim(t, "second", "gpu-0000-1b-00-0")
	answer := n.prepare(t, first)
	if answer.GetError() != "" || len(answer.GetDevices()) != 1 {
		t.Fatalf("got %v", answer)
	}
	ids := answer.GetDevices()[0].GetCdiDeviceIds()
	if want := []string{
		"k8s.gpu.nvidia.com/base=driver", "k8s.gpu.nvidia.com/claim=uid-first-gpu-0000-1b-00-0",
		"k8s.gpu.nvidia.com/claim=uid-first-metadata-gpu",
	}; !slices.Equal(ids, want) {
		t.Errorf("CDI devices %q", ids)
	}
	if refused := n.prepare(t, second).GetError(); !strings.Contains(refused, "team/first") {
		t.Errorf("a second claim got the GPU, or the error does not name the first: %q", refused)
	}

	// When the test has removed both CDI specs, the driver must write them again without a Prepare,
	// because the container runtime needs them when a container restarts.
	for _, name := range n.cdiFiles(t) {
		if err := os.Remove(filepath.Join(n.cfg.CDIRoot, name)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both specs are written again", func() bool { return len(n.cdiFiles(t)) == 2 })

	if msg := n.unprepare(t, first); msg != "" {
		t.Error(msg)
	}
	if a := n.prepare(t, second); a.GetError() != "" {
		t.Error(a.GetError())
	}
	if msg := n.unprepare(t, second); msg != "" {
		t.Error(msg)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	if left := n.cdiFiles(t); len(left) != 1 {
		t.Errorf("after a stop only the base spec stays: %v", left)
	}
	if len(published(t, n.client)) != 2 {
		t.Error("the plugin deleted its slices when it stopped")
	}
}

func TestRecreatedDeviceNodesReplaceBaseSpec(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	n.register(t)
	eventually(t, "the GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	base := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-base.json")
	before, err := os.Stat(base)
	if err != nil {
		t.Fatal(err)
	}
	n.setHardware("driver, with other device numbers", twoGPUs)
	eventually(t, "the base spec is a new file", func() bool {
		now, err := os.Stat(base)
		return err == nil && !os.SameFile(before, now)
	})
}

func TestPrepareWithoutDriverNamesTheReason(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setHardware("nothing", func() (nvidia.Node, error) {
		return nvidia.Node{}, &nvidia.NotReadyError{Reason: "no library", Remedy: "install the driver"}
	})
	n.start(t)
	n.register(t)
	c := n.claim(t, "early", "gpu-0000-1b-00-0")
	eventually(t, "the reason is known", func() bool { return strings.Contains(n.prepare(t, c).GetError(), "install the driver") })
	if err := n.probe.isReady(t.Context()); err == nil || !strings.Contains(err.Error(), "install the driver") {
		t.Errorf("readiness: %v", err)
	}
	if msg := n.unprepare(t, c); msg != "" {
		t.Errorf("unprepare needs no driver: %s", msg)
	}
	if got := published(t, n.client); len(got) != 0 {
		t.Errorf("published %v", got)
	}
	n.setHardware("driver", twoGPUs)
	eventually(t, "the late driver is noticed", func() bool { return n.prepare(t, c).GetError() == "" })
	eventually(t, "and its GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
}

func TestUninstallCleansUpNode(t *testing.T) {
	t.Parallel()
	for name, held := range map[string]bool{"nothing is held": false, "a claim is held": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.start(t)
			n.register(t)
			eventually(t, "the GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
			if held {
				if msg := n.prepare(t, n.claim(t, "held", "gpu-0000-1b-00-0")).GetError(); msg != "" {
					t.Fatal(msg)
				}
			}
			if err := n.client.AppsV1().DaemonSets("gpu").Delete(t.Context(), "plugin", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := n.stop(); err != nil {
				t.Fatal(err)
			}
			_, err := os.Stat(n.cfg.PluginDir)
			if gone := os.IsNotExist(err); gone == held {
				t.Errorf("plugin directory gone: %v", gone)
			}
			if files := n.cdiFiles(t); (len(files) == 0) == held {
				t.Errorf("CDI files: %v", files)
			}
		})
	}
}

func TestCleanupWaitsForOtherInstances(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other, err := uninstall.AcquireInstanceLock(t.Context(), n.cfg.PluginDir)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Release()
	n.start(t)
	n.register(t)
	eventually(t, "the GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	if err := n.client.AppsV1().DaemonSets("gpu").Delete(t.Context(), "plugin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.cfg.HookPath); err != nil {
		t.Errorf("the hook was removed while another instance runs: %v", err)
	}
	if files := n.cdiFiles(t); len(files) != 1 {
		t.Errorf("CDI files: %v", files)
	}
	if len(published(t, n.client)) != 2 {
		t.Error("the other instance's slices were withdrawn")
	}
	if last, err := other.TryExclusive(); !last || err != nil {
		t.Errorf("the other instance cannot clean up when it ends: %v", err)
	}
}

func TestMissingHookBlocksPrepareAndPublishing(t *testing.T) {
	n := newNode(t)
	n.cfg.HookSource = filepath.Join(t.TempDir(), "missing")
	n.start(t)
	n.register(t)
	c := n.claim(t, "one", "gpu-0000-1b-00-0")
	eventually(t, "the missing hook is named", func() bool { return strings.Contains(n.prepare(t, c).GetError(), n.cfg.HookSource) })
	if got := published(t, n.client); len(got) != 0 {
		t.Errorf("published %v", got)
	}
}

func TestFatalBackgroundErrorEndsRun(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(),
		Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
		Watch: watchNothing, StopWorkers: noWorkers,
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- d.Run(t.Context(), n.probe) }()
	eventually(t, "the plugin serves", func() bool {
		_, err := os.Stat(filepath.Join(n.cfg.RegistrarDir, "gpu.nvidia.com-uid-reg.sock"))
		return err == nil
	})
	d.HandleError(t.Context(), fmt.Errorf("%w: %w", kubeletplugin.ErrRecoverable, os.ErrDeadlineExceeded), "publishing")
	select {
	case err := <-done:
		t.Fatalf("a recoverable error ended the plugin: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	d.HandleError(t.Context(), os.ErrClosed, "the socket failed")
	if err := <-done; err == nil || !strings.Contains(err.Error(), "the socket failed") {
		t.Errorf("got %v", err)
	}
}
