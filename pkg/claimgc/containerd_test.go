package claimgc_test

import (
	"context"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claimgc"
)

// runningContainers fakes a container runtime. The field createdWith has, by container ID, the JSON
// with which the runtime created the container, and which names its CDI devices.
type runningContainers struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	name        string
	createdWith map[string]string
}

func (r *runningContainers) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: r.name}, nil
}

func (r *runningContainers) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	list := &runtimeapi.ListContainersResponse{}
	for _, id := range []string{"runs", "other", "ended", "left"} {
		state := runtimeapi.ContainerState_CONTAINER_RUNNING
		if id == "ended" {
			state = runtimeapi.ContainerState_CONTAINER_EXITED
		}
		list.Containers = append(list.Containers, &runtimeapi.Container{Id: id, State: state, Labels: map[string]string{
			"io.kubernetes.pod.namespace": "team", "io.kubernetes.pod.name": "pod-" + id,
		}})
	}
	return list, nil
}

func (r *runningContainers) ContainerStatus(
	_ context.Context, q *runtimeapi.ContainerStatusRequest,
) (*runtimeapi.ContainerStatusResponse, error) {
	info, there := r.createdWith[q.GetContainerId()]
	if !there || !q.GetVerbose() {
		return nil, status.Error(codes.NotFound, "gone")
	}
	return &runtimeapi.ContainerStatusResponse{Info: map[string]string{"info": info}}, nil
}

func serveRuntime(t *testing.T, r *runningContainers) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "cri.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, r)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return socket
}

func infoWithDevice(device string) string {
	return `{"config":{"CDI_devices":[{"name":"` + device + `"}]}}`
}

func TestPodsUsingClaimAreFoundByCDIDevice(t *testing.T) {
	const ours, others = "k8s.gpu.nvidia.com/claim=uid-1-gpu-0000-1b-00-0", "k8s.gpu.nvidia.com/claim=uid-10-gpu-0000-1b-00-0"
	socket := serveRuntime(t, &runningContainers{name: "containerd", createdWith: map[string]string{
		"runs": infoWithDevice(ours), "other": infoWithDevice(others), "ended": infoWithDevice(ours)}})
	users, err := claimgc.Containerd{Socket: socket}.UsersOf(t.Context(), "uid-1")
	if err != nil || !slices.Equal(users, []string{"team/pod-runs"}) {
		t.Errorf("%q, %v", users, err)
	}
}

func TestRuntimeWithoutDeviceInfoIsAnError(t *testing.T) {
	for name, c := range map[string]struct{ socket, says string }{
		"another runtime": {serveRuntime(t, &runningContainers{name: "cri-o"}), "cri-o"},
		"no answer":       {filepath.Join(t.TempDir(), "none.sock"), "none.sock"},
		"no socket":       {"", "--cri-socket"},
		"says nothing":    {serveRuntime(t, &runningContainers{name: "containerd", createdWith: map[string]string{"runs": ""}}), "does not say"},
	} {
		runtime := claimgc.Containerd{Socket: c.socket}
		if users, err := runtime.UsersOf(t.Context(), "uid-1"); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %q, %v", name, users, err)
		}
	}
}
