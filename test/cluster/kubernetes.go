package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/components"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

const (
	readyTimeout = 10 * time.Minute // generous: several builds may share the CPUs
	readyPoll    = 50 * time.Millisecond
)

// RESTConfig returns the administrator's client configuration for the API server.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig of cluster %s: %w", c.name, err)
	}
	return config, nil
}

// Client returns an administrator's client.
func (c *Cluster) Client() (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("reach cluster %s: %w", c.name, err)
	}
	return client, nil
}

// SchedulerRESTConfig returns the administrator's client configuration for the scheduler's own
// port, for metrics and profiles. It does not verify the scheduler's certificate, which is
// self-signed.
func (c *Cluster) SchedulerRESTConfig() (*rest.Config, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.Host = net.JoinHostPort(c.state.Network.address(0), strconv.Itoa(components.SchedulerPort))
	config.CAData, config.CAFile, config.Insecure = nil, "", true
	return config, nil
}

// Kubectl runs kubectl as the administrator and returns its standard output. On failure the error
// has its standard error.
func (c *Cluster) Kubectl(ctx context.Context, arguments ...string) (string, error) {
	return c.runClient(ctx, "kubectl", arguments)
}

// Helm runs helm as the administrator, like Kubectl.
func (c *Cluster) Helm(ctx context.Context, arguments ...string) (string, error) {
	return c.runClient(ctx, "helm", arguments)
}

func (c *Cluster) runClient(ctx context.Context, program string, arguments []string) (string, error) {
	command, err := c.ClientCommand(ctx, program, arguments...)
	if err != nil {
		return "", err
	}
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", program, strings.Join(arguments, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// ClientCommand returns a command that runs kubectl or helm as the administrator, for callers that
// connect its streams themselves.
func (c *Cluster) ClientCommand(ctx context.Context, program string, arguments ...string) (*exec.Cmd, error) {
	path, err := c.programs.Path(program)
	if err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, path, arguments...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	return command, nil
}

// awaitReady waits until every running node is Ready since its current boot, and Pods can be
// created.
func (c *Cluster) awaitReady(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready within %s", readyTimeout))
	defer cancel()
	for _, node := range c.Nodes() {
		if !node.Running() {
			continue
		}
		bootID, err := node.Exec(ctx, "cat", "/proc/sys/kernel/random/boot_id")
		if err != nil {
			return err
		}
		err = poll(ctx, func() error { return nodeReady(ctx, client, node.Name(), strings.TrimSpace(bootID)) })
		if err != nil {
			return fmt.Errorf("wait for node %s to be Ready: %w (logs: %s, %s)", node.Name(), err, node.Log("kubelet"), node.Log("containerd"))
		}
	}
	err = poll(ctx, func() error {
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for the default ServiceAccount: %w (logs: %s)", err, c.machines[controlPlane].LogDir())
	}
	return nil
}

func nodeReady(ctx context.Context, client kubernetes.Interface, name, bootID string) error {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if node.Status.NodeInfo.BootID != bootID {
		return fmt.Errorf("the Node's status is from another boot (%q)", node.Status.NodeInfo.BootID)
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			if condition.Status == corev1.ConditionTrue {
				return nil
			}
			return fmt.Errorf("condition Ready is %s: %s", condition.Status, condition.Message)
		}
	}
	return fmt.Errorf("the Node has no condition Ready yet")
}

// poll calls the function check until it succeeds or ctx ends. When ctx ends, poll's error contains
// the last error of check.
func poll(ctx context.Context, check func() error) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(readyPoll):
		}
	}
}

// LoadImage loads the images of an archive (OCI layout or docker) on the named nodes, or on all
// nodes if none is named. The images survive power cuts.
func (c *Cluster) LoadImage(ctx context.Context, archive string, nodes ...string) error {
	if len(nodes) == 0 {
		nodes = c.state.Nodes
	}
	for _, name := range nodes {
		node, err := c.Node(name)
		if err != nil {
			return err
		}
		if err := c.loadImage(ctx, node.spec, archive); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) loadImage(ctx context.Context, spec *machine.Spec, archive string) error {
	file, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("load image: %w", err)
	}
	defer func() { _ = file.Close() }()
	var output bytes.Buffer
	err = spec.Exec(
		ctx,
		machine.Streams{In: file, Out: &output, Err: &output},
		"ctr",
		"--namespace=k8s.io",
		"images",
		"import",
		"--local",
		"--snapshotter=overlayfs",
		"-",
	)
	if err != nil {
		return fmt.Errorf("load image archive %s: %w: %s", archive, err, strings.TrimSpace(output.String()))
	}
	return nil
}
