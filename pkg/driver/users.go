package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
)

// usersTimeout bounds how long a container runtime is asked about all of its containers.
const usersTimeout = 20 * time.Second

// usersOfClaim lists the containers, as namespace/pod, that run, or are about to, and have CDI
// devices of a claim. Only containerd is known to say which a container was made with; of another
// runtime nothing is concluded.
func usersOfClaim(ctx context.Context, socket string, uid types.UID) ([]string, error) {
	if socket == "" {
		return nil, errors.New("no socket of the container runtime is configured (--cri-socket)")
	}
	ctx, cancel := context.WithTimeout(ctx, usersTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connect to the container runtime at %s: %w", socket, err)
	}
	defer func() { _ = conn.Close() }()
	client := runtimeapi.NewRuntimeServiceClient(conn)
	version, err := client.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the container runtime at %s for its name: %w", socket, err)
	}
	if version.GetRuntimeName() != "containerd" {
		return nil, fmt.Errorf("the container runtime %s does not say which CDI devices a container has", version.GetRuntimeName())
	}
	list, err := client.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list the containers of the runtime at %s: %w", socket, err)
	}
	device := cdi.ClaimDeviceID(uid, "", nil)
	var users []string
	for _, c := range list.GetContainers() {
		if c.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED {
			continue
		}
		answer, err := client.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.GetId(), Verbose: true})
		switch {
		case status.Code(err) == codes.NotFound:
			continue
		case err != nil:
			return nil, fmt.Errorf("ask the container runtime at %s for container %s: %w", socket, c.GetId(), err)
		case answer.GetInfo()["info"] == "":
			return nil, fmt.Errorf("the container runtime at %s does not say how container %s was made", socket, c.GetId())
		case strings.Contains(answer.GetInfo()["info"], device):
			labels := c.GetLabels()
			users = append(users, labels["io.kubernetes.pod.namespace"]+"/"+labels["io.kubernetes.pod.name"])
		}
	}
	return users, nil
}
