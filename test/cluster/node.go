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

// Running tells whether the node's power is on.
func (n *Node) Running() bool {
	_, running := n.spec.PID()
	return running
}

// LogDir is the folder, on the host, of the node's log files. It survives power cuts and goes with the cluster.
func (n *Node) LogDir() string { return n.spec.LogDir() }

// Log is the path, on the host, of a component's log: init, boot-hook, containerd, kubelet; on the control plane etcd, kube-apiserver, ….
func (n *Node) Log(component string) string { return filepath.Join(n.spec.LogDir(), component+".log") }

// VarDir is the folder, on the host, that the node sees as /var.
func (n *Node) VarDir() string { return n.spec.Var() }

// PowerCut ends everything on the node at once. What was in /run, /dev and memory is lost; the disk stays as it is.
func (n *Node) PowerCut(ctx context.Context) error {
	unlock, err := lockDir(ctx, n.spec.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	return n.spec.PowerCut(ctx)
}

// Boot switches the node on and returns when it is Ready in Kubernetes, after this boot and not as a memory of the one before.
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

// RestartKubelet ends the kubelet with SIGTERM and starts it again; containers go on. It returns when the kubelet answers.
func (n *Node) RestartKubelet(ctx context.Context) error { return n.Service(ctx, "restart", "kubelet") }

// RestartContainerd ends containerd with SIGTERM and starts it again; containers go on. It returns when containerd answers.
func (n *Node) RestartContainerd(ctx context.Context) error {
	return n.Service(ctx, "restart", "containerd")
}

// Service stops, starts, restarts or kills (SIGKILL, then start) a component of the node, by the name of its log. It returns when that is
// done. A component that ends by itself is started again within a second.
func (n *Node) Service(ctx context.Context, verb, service string) error {
	return n.spec.Control(ctx, machine.Verb(verb), service)
}

// Exec runs a command on the node and returns what it printed to standard output. On failure the error has what it printed to standard error.
func (n *Node) Exec(ctx context.Context, argv ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	if err := n.ExecStreams(ctx, nil, &stdout, &stderr, argv...); err != nil {
		return stdout.String(), fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// ExecStreams runs a command on the node with the given standard streams, each of which may be nil. The error wraps an *exec.ExitError if the
// command ran and failed.
func (n *Node) ExecStreams(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer, argv ...string) error {
	return n.spec.Exec(ctx, machine.Streams{In: stdin, Out: stdout, Err: stderr}, argv...)
}
