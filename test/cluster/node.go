package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

// Node is one machine of a cluster.
type Node struct {
	cluster *Cluster
	spec    *machine.Spec
}

// Name is the node's name, in Kubernetes too.
func (n *Node) Name() string { return n.spec.Name }

// Address is the node's IP address, reachable from the host.
func (n *Node) Address() string {
	address, _, _ := strings.Cut(n.spec.Network.Address, "/")
	return address
}

// Running reports whether the node's power is on.
func (n *Node) Running() bool {
	_, running := n.spec.PID()
	return running
}

// LogDir is the host folder of the node's log files. It survives power cuts and ends with the
// cluster.
func (n *Node) LogDir() string { return n.spec.LogDir() }

// Log returns the host path of a component's log. component is init, boot-hook, containerd or
// kubelet, or on the control plane etcd, kube-apiserver, ….
func (n *Node) Log(component string) string { return filepath.Join(n.spec.LogDir(), component+".log") }

// VarDir is the folder, on the host, that the node sees as /var.
func (n *Node) VarDir() string { return n.spec.Var() }

// PowerCut kills everything on the node at once. /run, /dev and memory are lost. The disk stays.
func (n *Node) PowerCut(ctx context.Context) error {
	unlock, err := lockDir(ctx, n.spec.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	return n.spec.PowerCut(ctx)
}

// Boot switches the node on. It returns when the node has become Ready in Kubernetes after this
// boot.
func (n *Node) Boot(ctx context.Context) error {
	unlock, err := lockDir(ctx, n.spec.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := n.spec.Boot(ctx, n.cluster.programs.Machine); err != nil {
		return err
	}
	if n.Name() == controlPlane {
		return nil
	}
	return n.cluster.awaitReady(ctx)
}

// RestartKubelet ends the kubelet with SIGTERM and starts it again. Containers continue. It returns
// when the kubelet answers.
func (n *Node) RestartKubelet(ctx context.Context) error { return n.Service(ctx, "restart", "kubelet") }

// RestartContainerd ends containerd with SIGTERM and starts it again. Containers continue. It
// returns when containerd answers.
func (n *Node) RestartContainerd(ctx context.Context) error {
	return n.Service(ctx, "restart", "containerd")
}

// Service stops, starts, restarts or kills a component of the node, and returns when that is done.
// Kill means SIGKILL and then a start. service is the component's name, which is also the name of
// its log. A component that ends by itself restarts within a second.
func (n *Node) Service(ctx context.Context, verb, service string) error {
	return n.spec.Control(ctx, machine.Verb(verb), service)
}

// Exec runs a command on the node and returns its standard output. If the command fails, the error
// contains its standard error.
func (n *Node) Exec(ctx context.Context, argv ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	if err := n.ExecStreams(ctx, nil, &stdout, &stderr, argv...); err != nil {
		return stdout.String(), fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// ExecStreams runs a command on the node with these standard streams, each of which may be nil. The
// error wraps an *exec.ExitError if the command ran and failed.
func (n *Node) ExecStreams(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer, argv ...string) error {
	return n.spec.Exec(ctx, machine.Streams{In: stdin, Out: stdout, Err: stderr}, argv...)
}
