// Package machine runs a "machine": a process tree with its own mount, network, PID, IPC, UTS and
// cgroup namespaces and its own disk. It behaves like a computer that boots, loses power and boots
// again.
//
// Three programs share the code. The cluster calls the host's side (Boot, PowerCut, Exec, Control).
// The starter moves itself into the machine's cgroup and creates the namespaces. The init process
// is PID 1: it mounts the file system, configures the network, runs the boot hook and keeps the
// services running.
//
// Everything in a machine writes to its own disk or memory, never to the host's files. Its disk (/,
// /var/lib, /var/log) survives a power cut, its /run, /dev and /sys do not. When PID 1 dies,
// everything in the machine dies. A machine shares the host's kernel and does not confine hostile
// processes.
package machine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Spec describes a machine. The host stores it as JSON in the machine's folder, where PID 1 reads
// it.
type Spec struct {
	Name string `json:"name"`
	// Dir is the machine's folder on the host.
	Dir string `json:"dir"`
	// CgroupBases are the cluster's folders in the host's cgroup hierarchies. Each contains the folder
	// of the machine's cgroup.
	CgroupBases []string `json:"cgroupBases"`
	Network     Network  `json:"network"`
	// Mounts are the host's folders and files that the machine sees directly, not through an overlay.
	Mounts []Mount `json:"mounts,omitempty"`
	// BootHook is a command that PID 1 runs at each boot, before the services.
	BootHook []string `json:"bootHook,omitempty"`
	// Env is the environment of the boot hook, the services and Exec's commands, without PATH.
	Env      []string  `json:"env,omitempty"`
	Services []Service `json:"services"`
}

// Network holds a machine's addresses and routes.
type Network struct {
	Bridge   string   `json:"bridge"`   // name of the bridge on the host
	HostLink string   `json:"hostLink"` // the host's end of the machine's cable
	Address  string   `json:"address"`  // of eth0, with prefix length
	Gateway  string   `json:"gateway"`
	Loopback []string `json:"loopback,omitempty"` // addresses of lo in addition to 127.0.0.1
	Routes   []Route  `json:"routes,omitempty"`
	// HostRoutes are the networks that the host reaches through this machine, such as its Pods'
	// network. Boot adds a route for each on the host.
	HostRoutes []string `json:"hostRoutes,omitempty"`
}

// Route sends the packets for one network, Destination, to another machine, whose address is Via.
type Route struct {
	Destination string `json:"destination"`
	Via         string `json:"via"`
}

// Mount shows a path of the host in the machine.
type Mount struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	Writable bool   `json:"writable,omitempty"`
}

// Service is a process that PID 1 starts at boot, in the order of Spec.Services, and starts again
// whenever it ends.
type Service struct {
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	// Ready is an https or http URL that must answer 200, or unix://PATH that must accept connections.
	// PID 1 starts the next service only when this one is ready. If Ready is empty, it does not wait.
	Ready string `json:"ready,omitempty"`
}

// These are paths inside the machine.
const (
	// ToolsDir is where a machine sees the host's build cache.
	ToolsDir = "/opt/cluster/tools"
	// controlSocket is where the host sends its requests to PID 1. It is on the disk, because the host
	// cannot see the machine's /run.
	controlSocket = "/var/lib/machine.sock"
	searchPath    = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// These are names of folders and JSON files below Spec.Dir on the host.
const (
	layersDir = "layers"  // private writable layers over the host's top-level folders
	varDir    = "var"     // the machine's /var
	mountsDir = "rootfs"  // where PID 1 mounts the machine's root; empty in the host's namespace
	bootFile  = "boot"    // the bootRecord of the current boot
	specFile  = "machine" // this Spec
)

// LogDir returns the folder, on the host, of the machine's log files.
func (s *Spec) LogDir() string { return filepath.Join(s.Dir, varDir, "log") }

// Layer returns the host folder in which the machine's changes to a top-level folder are stored.
// top is that folder's name, "etc" for example.
func (s *Spec) Layer(top string) string { return filepath.Join(s.Dir, layersDir, top, "upper") }

// Var returns the folder, on the host, that the machine sees as /var.
func (s *Spec) Var() string { return filepath.Join(s.Dir, varDir) }

// Save writes the spec into the machine's folder.
func (s *Spec) Save() error {
	content, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	for _, dir := range []string{s.LogDir(), filepath.Join(s.Dir, mountsDir)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("create the folders of machine %s: %w", s.Name, err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.Dir, specFile+".json"), content, 0o600); err != nil {
		return fmt.Errorf("write the description of machine %s: %w", s.Name, err)
	}
	return nil
}

// Load reads the spec of the machine in dir.
func Load(dir string) (*Spec, error) {
	content, err := os.ReadFile(filepath.Join(dir, specFile+".json"))
	if err != nil {
		return nil, fmt.Errorf("read the description of the machine: %w", err)
	}
	spec := &Spec{}
	if err := json.Unmarshal(content, spec); err != nil {
		return nil, fmt.Errorf("decode the description of the machine in %s: %w", dir, err)
	}
	return spec, nil
}
