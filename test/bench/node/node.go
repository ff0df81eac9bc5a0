// Package node is a simulated GPU node with the production plugin on it, as a process of its own, and a kubelet's side of its sockets: for measuring.
//
// There is no kubelet and no container runtime: claims are allocated by whoever measures, and the calls are made at the moment and in the number that he
// wants. The API server is a real one.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	// Log is the file for the plugin's output, best in memory too, since in a Pod that is a pipe; and not beside CDIRoot, where the plugin watches what happens.
	// Empty is one among the node's files.
	Log  string
	GPUs int
	// Binary is the plugin's program. A copy of it is run, since how the file came into the page cache decides how much of it is resident.
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
	root := filepath.Join(o.Folder, o.Name)
	if n.Log == "" {
		n.Log = filepath.Join(root, "plugin.log")
	}
	var addresses []string
	for i := range o.GPUs {
		addresses = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x10+i))
		n.Devices = append(n.Devices, fmt.Sprintf("gpu-0000-%02x-00-0", 0x10+i))
	}
	for _, dir := range []string{root, o.CDIRoot, filepath.Dir(n.Log)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, fmt.Errorf("make node %s: %w", o.Name, err)
		}
	}
	var err error
	if n.Host, err = host.LayOut(ctx, root, addresses...); err != nil {
		return nil, err
	}
	if err := unpack(o.Binary, n.program()); err != nil {
		return nil, fmt.Errorf("make node %s: %w", o.Name, err)
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

// program is the copy of the plugin's program that runs there.
func (n *Node) program() string { return filepath.Join(n.Root, "program") }

// unpack copies a program as a container runtime unpacks it from an image's layer: in pieces of 32 KiB. A linker writes in one, which the kernel then keeps, and
// maps into a process, as folios of 2 MB.
func unpack(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	// Without the methods by which the kernel would copy all of it at once.
	_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, make([]byte, 32<<10))
	return errors.Join(err, out.Close())
}

// command is how the plugin is started there.
func (n *Node) command() *exec.Cmd {
	var args []string
	for _, f := range n.cfg.Fields() {
		args = append(args, "--"+f.Name+"="+f.Value.String())
	}
	cmd := exec.Command(n.program(), args...)
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
