package mps

import "path/filepath"

// Paths locates the files of MPS daemons on the host. The plugin, the supervisor and the container
// runtime all see the plugin's directory under the same path.
type Paths struct {
	// PluginDir is the plugin's directory, such as /var/lib/kubelet/plugins/gpu.nvidia.com.
	PluginDir string
}

// Root returns the directory that holds the supervisor's socket and one directory for each daemon.
func (p Paths) Root() string { return filepath.Join(p.PluginDir, "mps") }

// Socket returns the path of the supervisor's socket. Its file name cannot be a daemon's ID,
// because an ID has no "_".
func (p Paths) Socket() string { return filepath.Join(p.Root(), "supervisor_socket") }

// Dir returns the directory below Root that holds all files of the daemon with this ID.
func (p Paths) Dir(id string) string { return filepath.Join(p.Root(), id) }

// Pipes returns the directory with the daemon's pipes. Its clients mount this directory.
func (p Paths) Pipes(id string) string { return filepath.Join(p.Dir(id), "pipe") }

// Logs returns the directory with the logs of the control daemon and its MPS servers.
func (p Paths) Logs(id string) string { return filepath.Join(p.Dir(id), "log") }

// Shm returns the directory on the host that the daemon and its clients mount as /dev/shm.
func (p Paths) Shm(id string) string { return filepath.Join(p.Dir(id), "shm") }
