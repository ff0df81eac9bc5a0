// Package machine runs a "machine": a process tree in mount, network, PID, IPC, UTS and cgroup namespaces of its own, with a disk, that
// behaves towards what runs in it like a computer that boots, loses power and boots again.
//
// Three programs' worth of code live here. The host's side (Boot, PowerCut, Exec, Control) is called by the cluster. The starter puts
// itself into the machine's cgroup and creates the namespaces. The init process is PID 1: it mounts the machine's file system, sets up its
// network, runs the boot hook and keeps the services running.
//
// What a machine promises: everything in it writes to its own disk or its own memory, never to the host's files; its disk (/, /var/lib,
// /var/log) survives a power cut, its /run, /dev and /sys do not; when PID 1 dies, everything in it dies. It shares the host's kernel, and
// is no protection against a process in it that wants to get out.
package machine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Spec is what a machine is made of. It is kept as JSON in the machine's folder.
type Spec struct {
	Name string `json:"name"`
	// Dir is the machine's folder on the host.
	Dir string `json:"dir"`
	// CgroupBases are the cluster's folders in the host's cgroup hierarchies; the machine's is below each.
	CgroupBases []string `json:"cgroupBases"`
	Network     Network  `json:"network"`
	// Mounts are further folders and files of the host.
	Mounts []Mount `json:"mounts,omitempty"`
	// BootHook is run at each boot, before the services.
	BootHook []string `json:"bootHook,omitempty"`
	// Env is the environment of hook, services and commands, beside PATH.
	Env      []string  `json:"env,omitempty"`
	Services []Service `json:"services"`
}

// Network is how a machine is reached.
type Network struct {
	Bridge   string   `json:"bridge"`   // on the host
	HostLink string   `json:"hostLink"` // the host's end of the machine's cable
	Address  string   `json:"address"`  // with prefix length
	Gateway  string   `json:"gateway"`
	Loopback []string `json:"loopback,omitempty"` // further addresses, on lo
	Routes   []Route  `json:"routes,omitempty"`
	// HostRoutes are set on the host: networks that lie behind this machine.
	HostRoutes []string `json:"hostRoutes,omitempty"`
}

// Route is a network behind another machine.
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

// Service is a process that is started at boot in the given order and again whenever it ends.
type Service struct {
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	// Ready is waited for before the next service starts: an https or http URL that answers 200, or unix://PATH that accepts.
	Ready string `json:"ready,omitempty"`
}

// Paths in the machine.
const (
	// ToolsDir is where a machine sees the host's build cache.
	ToolsDir = "/opt/cluster/tools"
	// controlSocket takes requests of the host; it lies on the disk, because the host cannot see the machine's /run.
	controlSocket = "/var/lib/machine.sock"
	searchPath    = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// Disk folders below Spec.Dir, each with what the machine sees of it.
const (
	layersDir = "layers"  // private writable layers over the host's top-level folders
	varDir    = "var"     // the machine's /var
	mountsDir = "rootfs"  // where PID 1 puts the machine's root together; empty on the host
	bootFile  = "boot"    // the current boot: PID 1 and boot ID
	specFile  = "machine" // the Spec
)

// LogDir is the folder, on the host, of the machine's log files.
func (s *Spec) LogDir() string { return filepath.Join(s.Dir, varDir, "log") }

// Layer is the folder, on the host, whose content overlays the host's top-level folder (say "etc") in the machine.
func (s *Spec) Layer(top string) string { return filepath.Join(s.Dir, layersDir, top, "upper") }

// Var is the folder, on the host, of the machine's /var.
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
