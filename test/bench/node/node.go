// Package node provides a simulated GPU node for benchmarks. The production plugin runs there as a
// process of its own, and this package calls it through its sockets as the kubelet would. There is
// no kubelet and no container runtime, so the benchmark itself allocates and prepares claims. The
// API server is a real one.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
)

// Options describe a simulated node.
type Options struct {
	Name string
	// Folder is where the node's files and the plugin's checkpoint records are. Its path must be
	// short, because the folder contains sockets.
	Folder string
	// CDIRoot is the folder of the CDI specs. It is usually in memory, as on a real node.
	CDIRoot string
	// Log is the file for the plugin's output. It should be in memory, to be as fast as the pipe that
	// takes a Pod's output. It must not be next to CDIRoot, which the plugin watches. Empty means a
	// file in Folder.
	Log  string
	GPUs int
	// Binary is the path of the plugin's program. The node runs a copy of it that unpack made.
	Binary     string
	Kubeconfig string
	Client     kubernetes.Interface
	// MIGPolicy is the name of the plugin's MIG policy, or its setting "mig" in YAML. Empty means the
	// default.
	MIGPolicy string
}

// Node is a simulated node. The plugin runs there only between Start and Stop.
type Node struct {
	Options

	nodeharness.Node
	// Devices are the names of the node's whole GPUs.
	Devices []string
	cfg     *config.Config
}

// New creates the node's files and its Node object. It does not start the plugin.
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
	if n.Node, err = nodeharness.LayOut(ctx, root, addresses...); err != nil {
		return nil, err
	}
	if err := unpack(o.Binary, n.program()); err != nil {
		return nil, fmt.Errorf("make node %s: %w", o.Name, err)
	}
	n.cfg = n.Config()
	n.cfg.NodeName, n.cfg.CDIRoot, n.cfg.Kubeconfig = o.Name, o.CDIRoot, o.Kubeconfig
	n.cfg.HTTPAddress = ""
	if o.MIGPolicy != "" {
		n.cfg.SettingsFile = filepath.Join(root, "settings.yaml")
		mig := o.MIGPolicy
		if !strings.HasPrefix(mig, "{") {
			mig = fmt.Sprintf("{policy: %q}", mig)
		}
		if err := os.WriteFile(n.cfg.SettingsFile, []byte("mig: "+mig), 0o600); err != nil {
			return nil, err
		}
	}
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: o.Name}}
	_, err = o.Client.CoreV1().Nodes().Create(ctx, object, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create the Node %s: %w", o.Name, err)
	}
	return n, nil
}

// StateDir returns the folder of the plugin's checkpoint records.
func (n *Node) StateDir() string { return n.cfg.StateDir() }

// program returns the path of the node's copy of the plugin's program.
func (n *Node) program() string { return filepath.Join(n.Root, "program") }

// unpack copies a program in pieces of 32 KiB, as a container runtime does when it unpacks an
// image's layer. A linker writes a program at once, so the kernel later maps it in folios of 2 MB,
// which would make the plugin's resident memory look larger.
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
	// Without these wrappers, io.CopyBuffer would use methods of the files that copy everything at
	// once.
	_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, make([]byte, 32<<10))
	return errors.Join(err, out.Close())
}

// command returns the command that starts the plugin on this node. It names only settings that
// differ from their default, because an older program does not know newer settings.
func (n *Node) command() *exec.Cmd {
	var args []string
	defaults := config.Default().Fields()
	for i, f := range n.cfg.Fields() {
		if value := f.Value.String(); value != defaults[i].Value.String() {
			args = append(args, "--"+f.Name+"="+value)
		}
	}
	cmd := exec.Command(n.program(), args...)
	cmd.Env = append(os.Environ(), n.Environment())
	return cmd
}

// until calls ok every millisecond until ok succeeds or ctx ends. The error's text is "wait until "
// and what.
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
