package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"
)

// while simulates a program of another chart. It calls run for each node on which a Pod has a
// container of this name, and calls the returned function stop when that Pod is gone.
func (w *world) while(t *testing.T, container string, run func(node string) (stop func(), err error)) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	running := map[string]func(){}
	look := func() error {
		pods, err := w.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil //nolint:nilerr // the next look may succeed
		}
		wanted := map[string]bool{}
		for _, p := range pods.Items {
			has := slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
			if has && p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
				wanted[p.Spec.NodeName] = true
			}
		}
		for node, stop := range running {
			if !wanted[node] {
				stop()
				delete(running, node)
			}
		}
		for node := range wanted {
			if running[node] == nil {
				stop, err := run(node)
				if err != nil {
					return fmt.Errorf("%s on %s: %w", container, node, err)
				}
				running[node] = stop
			}
		}
		return nil
	}
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if err := look(); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		for stop := range maps.Values(running) {
			stop()
		}
	})
}

// listenOn returns a function that creates a Unix socket below the node's /var. It goes through a
// short link, because the real path is too long for a socket's address.
func (w *world) listenOn(t *testing.T, node string) func(ctx context.Context, path string) (net.Listener, error) {
	short := shortLink(t, w.node(t, node).VarDir())
	return func(ctx context.Context, path string) (net.Listener, error) {
		path = filepath.Join(short, strings.TrimPrefix(path, "/var/"))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.RemoveAll(path)); err != nil {
			return nil, err
		}
		return (&net.ListenConfig{}).Listen(ctx, "unix", path)
	}
}

func shortLink(t *testing.T, target string) string {
	dir, err := os.MkdirTemp("", "") //nolint:usetesting // the test's own has a long name, and a socket's path room for 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	link := filepath.Join(dir, "v")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	return link
}

// reference fakes the GPU container of NVIDIA's DRA driver on a node. It publishes devices, and
// writes a checkpoint and CDI specs in that driver's format.
type reference struct {
	kubeletplugin.DRAPlugin // the kubelet calls none of the methods that are not implemented

	w          *world
	t          *testing.T
	node, boot string
	dir        string
	uuids      []string

	mu     sync.Mutex
	claims map[types.UID]*resourceapi.ResourceClaim
}

func (w *world) referenceDriver(t *testing.T, node string) (stop func(), err error) {
	r := &reference{
		w: w, t: t, node: node, dir: w.hostDir(t, node, pluginDir),
		boot:   strings.TrimSpace(w.on(t, node, "cat", "/proc/sys/kernel/random/boot_id")),
		uuids:  uuidForm.FindAllString(w.smi(t, node, "-L"), -1),
		claims: map[types.UID]*resourceapi.ResourceClaim{},
	}
	listen := w.listenOn(t, node)
	helper, err := kubeletplugin.Start(
		context.WithoutCancel(t.Context()),
		r,
		kubeletplugin.DriverName(
			"gpu.nvidia.com",
		),
		kubeletplugin.KubeClient(w.Client),
		kubeletplugin.NodeName(node),
		kubeletplugin.HealthService(false),
		kubeletplugin.PluginListener(listen),
		kubeletplugin.RegistrarListener(listen),
	)
	if err != nil {
		return nil, err
	}
	var devices []resourceapi.Device
	for i, uuid := range r.uuids {
		devices = append(
			devices,
			resourceapi.Device{Name: fmt.Sprintf("gpu-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": {StringValue: ptr.To("gpu")}, "uuid": {StringValue: &uuid},
			}},
		)
	}
	err = helper.PublishResources(t.Context(), resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		node: {Slices: []resourceslice.Slice{{Devices: devices}}},
	}})
	return helper.Stop, err
}

func (r *reference) PrepareResourceClaims(
	_ context.Context,
	claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		spec := map[string]any{"cdiVersion": "0.5.0", "kind": "k8s.gpu.nvidia.com/claim"}
		var edits []any
		for _, d := range claim.Status.Allocation.Devices.Results {
			name := string(claim.UID) + "-" + d.Device
			edits = append(edits, map[string]any{"name": name, "containerEdits": map[string]any{
				"env": []string{
					"NVIDIA_VISIBLE_DEVICES=void",
					"REFERENCE_DEVICE=" + d.Device,
				}, "deviceNodes": []any{map[string]any{"path": "/dev/nvidiactl"}},
			}})
			devices = append(devices, kubeletplugin.Device{
				Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Device, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + name},
			})
		}
		spec["devices"] = edits
		r.write(r.specPath(claim.UID), spec)
		r.claims[claim.UID] = claim
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, r.keep()
}

func (r *reference) specPath(uid types.UID) string {
	return cdiRoot + "/k8s.gpu.nvidia.com-claim_" + string(uid) + ".yaml" // JSON is YAML
}

// write writes content as JSON to a file on the node. It runs a command there, because the host can
// only write below the node's /var.
func (r *reference) write(path string, content any) {
	raw, err := json.Marshal(content)
	if err != nil {
		r.t.Error(err)
		return
	}
	if _, err := r.w.node(r.t, r.node).Exec(context.WithoutCancel(r.t.Context()), "sh", "-c", `mkdir -p "${0%/*}" && printf %s "$1" >"$0"`,
		path, string(raw)); err != nil {
		r.t.Error(err)
	}
}

// keep writes the claims that the fake driver has prepared to its checkpoint file.
func (r *reference) keep() error {
	prepared := map[types.UID]any{}
	for uid, claim := range r.claims {
		var devices []any
		for _, d := range claim.Status.Allocation.Devices.Results {
			index := 0
			if _, err := fmt.Sscanf(d.Device, "gpu-%d", &index); err != nil {
				return err
			}
			devices = append(devices, map[string]any{"mig": nil, "gpu": map[string]any{
				"info": map[string]any{"uuid": r.uuids[index]},
				"device": map[string]any{
					"Requests": []string{d.Request}, "PoolName": d.Pool, "DeviceName": d.Device,
					"CDIDeviceIDs": []string{"k8s.gpu.nvidia.com/claim=" + string(uid) + "-" + d.Device},
				},
			}})
		}
		prepared[uid] = map[string]any{
			"checkpointState": "PrepareCompleted", "status": claim.Status,
			"preparedDevices": []any{map[string]any{"devices": devices, "configState": map[string]any{}}},
		}
	}
	raw, err := json.Marshal(map[string]any{
		"checksum": 1, "v1": map[string]any{"preparedClaims": map[string]any{}},
		"v2": map[string]any{"checksum": 2, "nodeBootID": r.boot, "preparedClaims": prepared},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dir, "checkpoint.json"), raw, 0o600)
}

func (r *reference) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	results := map[types.UID]error{}
	for _, claim := range claims {
		delete(r.claims, claim.UID)
		_, err := r.w.node(r.t, r.node).Exec(context.WithoutCancel(r.t.Context()), "rm", "-f", r.specPath(claim.UID))
		results[claim.UID] = err
	}
	return results, r.keep()
}

func (r *reference) HandleError(_ context.Context, err error, msg string) {
	r.t.Logf("the fake of NVIDIA's DRA driver on %s: %s: %v", r.node, msg, err)
}

// devicePlugin fakes NVIDIA's device plugin on a node.
type devicePlugin struct {
	deviceplugin.UnimplementedDevicePluginServer
	ended context.Context
}

func (p devicePlugin) GetDevicePluginOptions(context.Context, *deviceplugin.Empty) (*deviceplugin.DevicePluginOptions, error) {
	return &deviceplugin.DevicePluginOptions{}, nil
}

func (p devicePlugin) ListAndWatch(_ *deviceplugin.Empty, stream grpc.ServerStreamingServer[deviceplugin.ListAndWatchResponse]) error {
	var devices []*deviceplugin.Device
	for i := range 8 {
		devices = append(devices, &deviceplugin.Device{ID: fmt.Sprintf("GPU-%d", i), Health: deviceplugin.Healthy})
	}
	err := stream.Send(&deviceplugin.ListAndWatchResponse{Devices: devices})
	<-p.ended.Done()
	return err
}

func (p devicePlugin) Allocate(_ context.Context, request *deviceplugin.AllocateRequest) (*deviceplugin.AllocateResponse, error) {
	answer := &deviceplugin.AllocateResponse{}
	for _, c := range request.GetContainerRequests() {
		answer.ContainerResponses = append(answer.ContainerResponses, &deviceplugin.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(c.GetDevicesIds(), ",")},
		})
	}
	return answer, nil
}

// devicePlugin registers a fake device plugin with eight GPUs at a node's kubelet. stop also
// restarts the kubelet, which would otherwise remember the GPUs for five minutes. The guide allows
// that.
func (w *world) devicePlugin(t *testing.T, node string) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	const dir, socket = "/var/lib/kubelet/device-plugins/", "nvidia-gpu.sock"
	listener, err := w.listenOn(t, node)(ctx, dir+socket)
	if err != nil {
		cancel()
		return nil, err
	}
	server := grpc.NewServer()
	deviceplugin.RegisterDevicePluginServer(server, devicePlugin{ended: ctx})
	go func() { _ = server.Serve(listener) }()
	stop = func() {
		cancel()
		server.Stop()
		if err := w.node(t, node).RestartKubelet(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("restart the kubelet of %s: %v", node, err)
		}
	}
	kubelet := filepath.Join(filepath.Dir(listener.Addr().String()), "kubelet.sock")
	conn, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return stop, err
	}
	defer func() { _ = conn.Close() }()
	_, err = deviceplugin.NewRegistrationClient(conn).Register(ctx, &deviceplugin.RegisterRequest{
		Version: deviceplugin.Version, Endpoint: socket, ResourceName: "nvidia.com/gpu",
	})
	return stop, err
}
