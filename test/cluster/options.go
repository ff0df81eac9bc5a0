package cluster

import (
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"regexp"
	"time"
)

// DefaultName is the name of a cluster whose Options.Name is empty.
const DefaultName = "default"

// Options describe the cluster that Up starts. The zero value is a cluster of one node.
type Options struct {
	// Name distinguishes clusters on this host: at most 12 lower-case letters, digits and dashes.
	Name string
	// Nodes are the machines that run Pods; none means one with default options.
	Nodes []NodeOptions
	// ControlPlaneOnly starts no machine that runs Pods. A test can then create Node objects without
	// kubelets, and they stay unchanged because the controller that taints Nodes without heartbeats is
	// off.
	ControlPlaneOnly bool
	// Kubernetes is the version of Kubernetes' programs: 1.37 for the tested release of that line (see
	// [Releases]), or v1.37.1. Empty means the version that tools/go.mod pins.
	Kubernetes string
	// Containerd is the version of containerd, likewise (see [ContainerdVersions]).
	Containerd string
	// ReleaseDefaults leaves feature gates and APIs as the release has them, as users get them.
	// Otherwise every gate and API for dynamic resource allocation is on.
	ReleaseDefaults bool
	// FeatureGates are set on every component, and override the defaults.
	FeatureGates map[string]bool
	// RestartPause is the longest time that a kubelet waits before it restarts a container, for tests
	// that end containers often. The wait starts at one second and doubles. 0 keeps Kubernetes' own
	// limits: ten seconds, doubling up to five minutes.
	RestartPause time.Duration
	// Images are archives (OCI layout or docker) that every node gets in addition to the default ones.
	Images []string
	// Output receives progress lines. Nil discards them.
	Output io.Writer
}

// NodeOptions describe one node. The zero value is a plain node named by its position: node1,
// node2, ….
type NodeOptions struct {
	Name   string
	Labels map[string]string
	// BootHook is a command with an absolute path that the node runs at every boot, with NODE_NAME in
	// its environment. It runs after the file system and network are up and before containerd starts.
	// If it fails, the boot fails. It may create device nodes in /dev and write to any file, because
	// all these files belong to the node and not to the host.
	BootHook []string
	// DisableCDI makes containerd ignore CDI devices.
	DisableCDI bool
	// KubeletRoot is the kubelet's root directory, below /var. Empty means /var/lib/kubelet.
	KubeletRoot string
	// Mounts are paths of the host whose content the node always sees as it is now. The node sees the
	// host's other files as they were at the node's boot, and never the host's /var, /run and /dev.
	Mounts []Mount
}

// Mount shows a path of the host on a node. It is read-only unless Writable is set.
type Mount struct {
	Source string
	// Target is the path on the node; empty means Source.
	Target   string
	Writable bool
}

var (
	clusterName = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,10}[a-z0-9])?$`)
	nodeName    = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$`)
)

const maxNodes = 100

// complete returns the options with defaults for empty fields. It returns an error for options that
// cannot work.
func (o Options) complete() (Options, error) {
	if o.Name == "" {
		o.Name = DefaultName
	}
	if !clusterName.MatchString(o.Name) {
		return o, fmt.Errorf("cluster name %q: want a lower-case letter, then up to 11 letters, digits and dashes", o.Name)
	}
	if o.ControlPlaneOnly && len(o.Nodes) > 0 {
		return o, fmt.Errorf("cluster %s: %d nodes wanted, and the control plane only", o.Name, len(o.Nodes))
	}
	if len(o.Nodes) == 0 && !o.ControlPlaneOnly {
		o.Nodes = []NodeOptions{{}}
	}
	if len(o.Nodes) > maxNodes {
		return o, fmt.Errorf("cluster %s: %d nodes wanted, at most %d fit into its network", o.Name, len(o.Nodes), maxNodes)
	}
	versions, err := o.versions()
	if err != nil {
		return o, fmt.Errorf("cluster %s: %w", o.Name, err)
	}
	o.Kubernetes, o.Containerd = versions.Kubernetes, versions.Containerd
	gates := map[string]bool{}
	if !o.ReleaseDefaults {
		gates = releaseOf(o.Kubernetes).featureGates()
	}
	maps.Copy(gates, o.FeatureGates)
	for gate, needed := range gateNeeds {
		if on, set := gates[needed]; gates[gate] && set && !on {
			gates[gate] = false
		}
	}
	o.FeatureGates = gates
	taken := map[string]bool{controlPlane: true}
	nodes := make([]NodeOptions, len(o.Nodes))
	for i, node := range o.Nodes {
		if node.Name == "" {
			node.Name = fmt.Sprintf("node%d", i+1)
		}
		if err := node.validate(); err != nil {
			return o, err
		}
		if taken[node.Name] {
			return o, fmt.Errorf("node name %q: used twice or reserved", node.Name)
		}
		taken[node.Name] = true
		nodes[i] = node
	}
	o.Nodes = nodes
	return o, nil
}

func (n NodeOptions) validate() error {
	if !nodeName.MatchString(n.Name) {
		return fmt.Errorf("node name %q: want a lower-case letter, then up to 19 letters, digits and dashes", n.Name)
	}
	if len(n.BootHook) > 0 && !filepath.IsAbs(n.BootHook[0]) {
		return fmt.Errorf("boot hook %q of node %s: want an absolute path", n.BootHook[0], n.Name)
	}
	for _, mount := range n.Mounts {
		if !filepath.IsAbs(mount.Source) || (mount.Target != "" && !filepath.IsAbs(mount.Target)) {
			return fmt.Errorf("mount of %q at %q on node %s: want absolute paths", mount.Source, mount.Target, n.Name)
		}
	}
	return nil
}
