package e2e

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// nicDriver is the name of a second DRA driver, a fake that runs in the test's process.
const nicDriver = "nic.test"

// nics is a fake DRA driver for network cards. It accepts every claim without any CDI device, and
// remembers the claims that it has prepared and not yet unprepared.
type nics struct {
	kubeletplugin.DRAPlugin // the kubelet calls none of the methods that are not implemented

	mu       sync.Mutex
	prepared map[types.UID]bool
	failed   error
}

func (n *nics) PrepareResourceClaims(
	_ context.Context,
	claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		n.prepared[claim.UID] = true
		var devices []kubeletplugin.Device
		for _, r := range claim.Status.Allocation.Devices.Results {
			if r.Driver == nicDriver {
				devices = append(devices, kubeletplugin.Device{Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device})
			}
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

func (n *nics) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	results := map[types.UID]error{}
	for _, claim := range claims {
		delete(n.prepared, claim.UID)
		results[claim.UID] = nil
	}
	return results, nil
}

func (n *nics) HandleError(_ context.Context, err error, msg string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failed = errors.Join(n.failed, errors.New(msg), err)
}

func (n *nics) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.prepared)
}

// serveNICs starts the fake driver for network cards on a node and publishes one device.
func (w *world) serveNICs(t *testing.T, node string) *nics {
	t.Helper()
	driver := &nics{prepared: map[types.UID]bool{}}
	// The kubelet connects to the socket by its path on the node. The test creates the socket in the
	// same directory, by the directory's path on the host.
	listen := func(ctx context.Context, path string) (net.Listener, error) {
		path = filepath.Join(w.node(t, node).VarDir(), strings.TrimPrefix(path, "/var/"))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		return (&net.ListenConfig{}).Listen(ctx, "unix", path)
	}
	helper, err := kubeletplugin.Start(context.WithoutCancel(t.Context()), driver,
		kubeletplugin.DriverName(nicDriver), kubeletplugin.KubeClient(w.Client), kubeletplugin.NodeName(node), kubeletplugin.HealthService(false),
		kubeletplugin.PluginListener(listen), kubeletplugin.RegistrarListener(listen))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		helper.Stop()
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(
			w.Client.ResourceV1().DeviceClasses().Delete(ctx, nicDriver, metav1.DeleteOptions{}),
			w.Client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{},
				metav1.ListOptions{FieldSelector: "spec.driver=" + nicDriver}),
		); err != nil {
			t.Errorf("remove what the other driver has published: %v", err)
		}
	})
	if err := helper.PublishResources(t.Context(), resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		node: {Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: "eth0"}}}}},
	}}); err != nil {
		t.Fatal(err)
	}
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: nicDriver},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{
			{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "` + nicDriver + `"`}},
		}},
	}
	if _, err := w.Client.ResourceV1().DeviceClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return driver
}

func (w *world) testOtherDriver(t *testing.T) {
	driver := w.serveNICs(t, h100)
	u := w.tenant(t)
	u.template(
		"both",
		`requests: [{name: nic, exactly: {deviceClassName: `+nicDriver+`}}, {name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]`,
	)
	u.template("nic", `requests: [{name: nic, exactly: {deviceClassName: `+nicDriver+`}}]`)
	u.pod("user", fromTemplate("both", "both"), container("all", "both"), container("net", "both/nic"))
	u.running("user")
	if driver.count() != 1 {
		t.Errorf("the other driver has prepared %d claims, want 1", driver.count())
	}
	if got := len(u.claimOf(t, u.namespace, "user", "both").Status.Allocation.Devices.Results); got != 2 {
		t.Errorf("the claim has %d results, want 2", got)
	}
	// The container that uses only the network card must get nothing from the GPU driver.
	if out, err := u.exec(t, u.namespace, "user", "net", "sh", "-c", "ls -d /dev/nvidia*"); err == nil {
		t.Errorf("the container with the network card has %s", out)
	}
	if w.sim.SMI != "" {
		u.sees("user", "all", u.allocated("user", "both", "gpu"))
	}
	// The GPU driver must create no CDI spec for a claim without a GPU. After the end of the Pods
	// neither driver may have anything left of their claims.
	specs := func() string { return w.on(t, h100, "find", cdiRoot) }
	both := string(u.claimOf(t, u.namespace, "user", "both").UID)
	if out := specs(); !strings.Contains(out, claimSpecPath(both)) {
		t.Errorf("the claim with a GPU has no spec %s:\n%s", claimSpecPath(both), out)
	}
	u.end("user")
	if out := specs(); strings.Contains(out, both) {
		t.Errorf("the claim's Pod is gone, and its spec is still there:\n%s", out)
	}
	u.pod("net", fromTemplate("nic", "nic"))
	u.running("net")
	if out, uid := specs(), string(u.claimOf(t, u.namespace, "net", "nic").UID); strings.Contains(out, uid) || w.hasRecord(t, h100, uid) {
		t.Errorf("the claim %s without a GPU has a spec or a record:\n%s", uid, out)
	}
	u.end("net")
	if driver.count() != 0 {
		t.Errorf("the other driver still has %d claims", driver.count())
	}
	if driver.failed != nil {
		t.Error(driver.failed)
	}
}
