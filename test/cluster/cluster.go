package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/machine"
)

// Cluster is a running cluster, or one that failed to start or crashed and left its state on disk.
type Cluster struct {
	name     string
	programs *Programs
	state    state
	machines map[string]*machine.Spec // by name, including control-plane
}

// Open returns the running cluster with the given name, which another process may have brought up.
// It returns an error if there is none, or if the cluster never came up completely.
func Open(name string) (*Cluster, error) {
	if name == "" {
		name = DefaultName
	}
	read, err := readState(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no cluster %s: bring it up first", name)
	}
	if err != nil {
		return nil, err
	}
	if read.Programs == nil {
		return nil, fmt.Errorf("cluster %s was brought up by another version of this tool: take it down", name)
	}
	if !read.Complete {
		return nil, fmt.Errorf("cluster %s never came up, or is coming up: take it down, or wait", name)
	}
	opened := &Cluster{name: name, state: read, programs: read.Programs, machines: map[string]*machine.Spec{}}
	for _, machineName := range append([]string{controlPlane}, read.Nodes...) {
		if opened.machines[machineName], err = machine.Load(machineDir(name, machineName)); err != nil {
			return nil, err
		}
	}
	return opened, nil
}

func machineDir(cluster, name string) string {
	return filepath.Join(clusterDir(cluster), "machines", name)
}

// Name is the cluster's name.
func (c *Cluster) Name() string { return c.name }

// Kubeconfig is the path of the administrator's kubeconfig.
func (c *Cluster) Kubeconfig() string { return filepath.Join(clusterDir(c.name), "kubeconfig") }

// Programs are the programs that the cluster was built from, kubectl and helm among them.
func (c *Cluster) Programs() *Programs { return c.programs }

// Nodes are the machines that run Pods, in the order of Options.Nodes.
func (c *Cluster) Nodes() []*Node {
	nodes := make([]*Node, 0, len(c.state.Nodes))
	for _, name := range c.state.Nodes {
		nodes = append(nodes, &Node{cluster: c, spec: c.machines[name]})
	}
	return nodes
}

// Node returns the machine with that name: a node, or the control plane, which is named
// control-plane and runs no Pods. It returns an error if there is none.
func (c *Cluster) Node(name string) (*Node, error) {
	spec, ok := c.machines[name]
	if !ok {
		return nil, fmt.Errorf("cluster %s has no node %q; it has %s and %v", c.name, name, controlPlane, c.state.Nodes)
	}
	return &Node{cluster: c, spec: spec}, nil
}

// Machines are all machines of the cluster: the control plane, then the nodes.
func (c *Cluster) Machines() []*Node {
	return append([]*Node{{cluster: c, spec: c.machines[controlPlane]}}, c.Nodes()...)
}

// List returns the names of the clusters that are up or have left files.
func List() ([]string, error) {
	entries, err := os.ReadDir(stateRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list clusters: %w", err)
	}
	var names []string
	for _, entry := range entries {
		if clusterName.MatchString(entry.Name()) {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}
