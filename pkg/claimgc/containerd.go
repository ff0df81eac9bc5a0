package claimgc

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

// usersTimeout limits all requests of one UsersOf call to the container runtime.
const usersTimeout = 20 * time.Second

// Containerd asks the container runtime containerd for the devices of its containers. Socket is the
// path of its CRI socket, or empty if none is configured.
type Containerd struct{ Socket string }

// UsersOf returns the Pods with containers that have CDI devices of the claim and have not exited.
// Only containerd reports a container's CDI devices. With any other container runtime, UsersOf
// returns an error.
func (c Containerd) UsersOf(ctx context.Context, claim types.UID) ([]string, error) {
	socket := c.Socket
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
		return nil, fmt.Errorf("get the name of the container runtime at %s: %w", socket, err)
	}
	if version.GetRuntimeName() != "containerd" {
		return nil, fmt.Errorf("the container runtime %s does not report which CDI devices a container has", version.GetRuntimeName())
	}
	list, err := client.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list the containers of the runtime at %s: %w", socket, err)
	}
	device := cdi.ClaimDeviceID(claim, "", nil)
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
			return nil, fmt.Errorf("ask the container runtime at %s for the status of container %s: %w", socket, c.GetId(), err)
		case answer.GetInfo()["info"] == "":
			return nil, fmt.Errorf("the container runtime at %s does not say how container %s was created", socket, c.GetId())
		case strings.Contains(answer.GetInfo()["info"], device):
			labels := c.GetLabels()
			users = append(users, labels["io.kubernetes.pod.namespace"]+"/"+labels["io.kubernetes.pod.name"])
		}
	}
	return users, nil
}
