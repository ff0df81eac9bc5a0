// Package node is a simulated GPU node with the production plugin on it, as a process of its own, and a kubelet's side of its sockets: for measuring.
//
// There is no kubelet and no container runtime: claims are allocated by whoever measures, and the calls are made at the moment and in the number that he
// wants. The API server is a real one.
package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/host"
)

// Options say what a node is.
type Options struct {
	Name string
	// Folder is where the node's files and the plugin's records lie. Its path must be short: there are sockets below it.
	Folder string
	// CDIRoot is where the specs lie, usually in memory.
	CDIRoot string
	GPUs    int
	// Binary is the plugin's program.
	Binary     string
	Kubeconfig string
	Client     kubernetes.Interface
	// MIGPolicy is what the plugin may do about partitions; empty means its default.
	MIGPolicy string
}

// Node is such a node.
type Node struct {
	Options

	host.Host
	// Devices are the names of its GPUs as wholes.
	Devices []string
	cfg     *config.Config
}

// New makes the node and its Node object. No plugin runs there yet.
func New(ctx context.Context, o Options) (*Node, error) {
	n := &Node{Options: o}
	var addresses []string
	for i := range o.GPUs {
		addresses = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x10+i))
		n.Devices = append(n.Devices, fmt.Sprintf("gpu-0000-%02x-00-0", 0x10+i))
	}
	root := filepath.Join(o.Folder, o.Name)
	for _, dir := range []string{root, o.CDIRoot} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, fmt.Errorf("make node %s: %w", o.Name, err)
		}
	}
	var err error
	if n.Host, err = host.LayOut(ctx, root, addresses...); err != nil {
		return nil, err
	}
	n.cfg = n.Config()
	n.cfg.NodeName, n.cfg.CDIRoot, n.cfg.Kubeconfig, n.cfg.ShmRoot = o.Name, o.CDIRoot, o.Kubeconfig, o.CDIRoot
	n.cfg.HTTPAddress, n.cfg.MIGPolicy = "", o.MIGPolicy
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: o.Name}}
	_, err = o.Client.CoreV1().Nodes().Create(ctx, object, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create the Node %s: %w", o.Name, err)
	}
	return n, nil
}

// StateDir is where the plugin keeps its records.
func (n *Node) StateDir() string { return n.cfg.StateDir() }

// command is how the plugin is started there.
func (n *Node) command() *exec.Cmd {
	var args []string
	for _, f := range n.cfg.Fields() {
		args = append(args, "--"+f.Name+"="+f.Value.String())
	}
	cmd := exec.Command(n.Binary, args...)
	cmd.Env = append(os.Environ(), n.Environment())
	return cmd
}

// until polls what takes milliseconds, and says what was waited for if the context ends before.
func until(ctx context.Context, what string, ok func() error) error {
	for {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w (last: %w)", what, ctx.Err(), err)
		case <-time.After(time.Millisecond):
		}
	}
}
